"""Puts the tables of measured.json and broken.json into the README, between their markers."""

from __future__ import annotations

import json
import re
from pathlib import Path

HERE = Path(__file__).resolve().parent


def main() -> None:
    measured = "| compared | cases | largest error | bound |\n|---|---|---|---|\n" + "".join(
        f"| {row['claim']} | {row['cases']} | {row['error']:.1e} | {row['bound']} |\n"
        for row in read("measured.json")
    )
    broken = "| area | what is guarded | noticed by | noticed |\n|---|---|---|---|\n" + "".join(
        f"| {row['area']} | {row['claim']} | `{row['tests'].removeprefix('tests/')}` | "
        f"{'yes' if row['sound'] and row['caught'] else 'NO'} |\n"
        for row in read("broken.json")
    )
    page = HERE / "README.md"
    text = page.read_text()
    for name, rows in (("measured", measured), ("broken", broken)):
        pattern = rf"(<!-- {name} -->\n).*?(<!-- end -->)"
        text = re.sub(pattern, lambda m, rows=rows: m[1] + rows + m[2], text, flags=re.DOTALL)
    page.write_text(text)


def read(name: str) -> list[dict]:
    path = HERE / name
    return json.loads(path.read_text()) if path.exists() else []


if __name__ == "__main__":
    main()
