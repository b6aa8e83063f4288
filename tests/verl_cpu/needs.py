"""Print what the wheels in a folder require, less what the CPU environment pins itself or does without."""

import sys
import zipfile
from email import message_from_string
from pathlib import Path

from pip._vendor.packaging.requirements import Requirement

PINNED = {"torch", "transformers", "ray", "setuptools"}
"""Named with their versions in build.sh."""

LEFT_OUT = {"torchvision", "torchaudio", "torchcodec", "wandb"}
"""Pictures and sound (their wheels bring a second torch), and a tracker that nothing here uses."""


def requirements(wheel: Path) -> list[str]:
    """Requirements of a wheel that hold on this machine, without its extras."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = message_from_string(archive.read(name).decode())
    found = [Requirement(line) for line in metadata.get_all("Requires-Dist", [])]
    wanted = [need for need in found if need.marker is None or need.marker.evaluate({"extra": ""})]
    return [str(need).split(";")[0].strip() for need in wanted if need.name.lower() not in PINNED | LEFT_OUT]


for path in sorted(Path(sys.argv[1]).glob("*.whl")):
    print("\n".join(requirements(path)))
