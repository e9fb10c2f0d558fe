"""Print the results of coverage.py as Markdown: one row per module of timm, then the reason for every refusal.

.venv/bin/python benchmarks/coverage_table.py
"""

from __future__ import annotations

import coverage
import coverage_models as models


def main() -> None:
    rows = [row for row in coverage.read_rows().values() if row["stage"] == "quantize"]
    order = [*models.TIMM_90, *models.TIMM_60, "transformers"]
    print("| module | names | run | pass | pass up to 100 M parameters | with all blocks | worst parity | lowest cosine |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for module in order:
        found = [row for row in rows if row["module"] == module]
        passed = [row for row in found if row["result"] == "ok"]
        total = len(coverage.names_of("transformers" if module == "transformers" else "timm", [module]))
        counted = [row for row in found if row["parameters"] and float(row["parameters"]) <= models.MANY]
        good = sum(row["result"] == "ok" for row in counted)
        deep = sum(row["blocks"] == "all" for row in counted if row["result"] == "ok")
        parity = max((float(row["parity"]) for row in passed), default=0.0)
        cosine = min((float(row["cosine"]) for row in passed), default=0.0)
        columns = [module, total, len(found), len(passed), f"{good} of {len(counted)}", deep, f"{parity:.1e}", f"{cosine:.3f}"]
        print(f"| {' | '.join(map(str, columns))} |")
    print()
    for row in rows:
        if row["result"] != "ok":
            print(f"- `{row['name']}`: {row['reason']}")


if __name__ == "__main__":
    main()
