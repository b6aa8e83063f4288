"""Tables for people, made from figures that are simple enough to check by eye."""

from brace_rl.oracle.readable import curves_markdown


def row(lag: int, method: str, *area: float) -> dict:
    return {"lag": lag, "method": method, "area": list(area), "final": list(area), "success": [0.05]}


def test_a_combination_is_compared_with_both_of_its_parts_seed_by_seed():
    rows = [
        row(10, "mc", 0.1, 0.2),
        row(10, "mc+kpop", 0.2, 0.4),
        row(10, "brace:100", 0.3, 0.3),
        row(10, "brace:100+kpop", 0.4, 0.6),
        row(10, "brace:100+dis", 0.9, 0.9),
    ]
    lines = curves_markdown(rows).splitlines()
    assert [line for line in lines if " - `" in line] == [
        "| `brace:100+kpop` - `brace:100` | +0.200 ± 1.271 |",
        "| `brace:100+kpop` - `mc+kpop` | **+0.200 ± 0.000** |",
    ]


def test_without_combinations_there_is_no_such_table():
    assert "either of its parts" not in curves_markdown([row(0, "mc", 0.1, 0.2), row(0, "brace:100", 0.1, 0.2)])
