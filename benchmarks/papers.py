"""Writes docs/papers.md: what the five papers report, beside what comes out here.

    python benchmarks/papers.py p2res CRITEO_FOLDER TAOBAO_FOLDER   counts
    python benchmarks/papers.py fae CRITEO_FOLDER TAOBAO_FOLDER     counts
    python benchmarks/papers.py dct train.txt.gz                    trains
    python benchmarks/papers.py simulated                           runs the planner's cost model
    python benchmarks/papers.py page                                writes tables and figures

Folders are of `fusedrec prepare`.  Each command but the last keeps its results in
benchmarks/results/papers, where `fusedrec bench benchmarks/papers.yaml` puts its own; the page is
made of these files alone.  `make papers` runs all of it.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import paper_2d
import paper_dct
import paper_fae
import paper_fusedrec
import paper_p2res
from paper_results import Results, points_of_all
from ranks import put_into

from fusedrec_torchrec.core.files import write_json
from fusedrec_torchrec.training.data.prepared import PreparedData

ROOT = Path(__file__).parents[1]
STORED = ROOT / "benchmarks" / "results" / "papers"
PAGE = ROOT / "docs" / "papers.md"
FIGURES = ROOT / "docs" / "figures"
PAPERS = (paper_fusedrec, paper_p2res, paper_fae, paper_dct, paper_2d)


def filled(text: str) -> str:
    """Returns the page with all tables that there are results for."""
    results = Results(STORED)
    for paper in PAPERS:
        for name, table in paper.tables(results).items():
            text = put_into(text, name, table)
    return text


def write_page() -> None:
    PAGE.write_text(filled(PAGE.read_text()))
    results = Results(STORED)
    for name, draw in (
        ("fusedrec", paper_fusedrec.draw),
        ("p2res", paper_p2res.draw),
        ("fae", paper_fae.draw),
        ("dct", paper_dct.draw),
    ):
        if not draw(results, FIGURES / f"papers_{name}.png"):
            print(f"no figure of {name}, which was not measured")


def measured(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns what a command finds out."""
    if arguments.what == "simulated":
        return points_of_all()
    if arguments.what == "dct":
        return paper_dct.measure(arguments.data, arguments.seeds, arguments.epochs)
    data = {
        "Criteo": PreparedData.open(arguments.criteo),
        "Taobao": PreparedData.open(arguments.taobao),
    }
    return paper_p2res.measure(data) if arguments.what == "p2res" else paper_fae.measure(data)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="what", required=True)
    for name in ("p2res", "fae"):
        command = commands.add_parser(name)
        command.add_argument("criteo", type=Path, help="folder of prepared Criteo data")
        command.add_argument("taobao", type=Path, help="folder of prepared Taobao data")
    dct = commands.add_parser("dct")
    dct.add_argument("data", help="a text file in Criteo's format")
    dct.add_argument("--seeds", type=int, default=8)
    dct.add_argument("--epochs", type=int, default=1)
    commands.add_parser("simulated")
    commands.add_parser("page")
    arguments = parser.parse_args()
    if arguments.what == "page":
        write_page()
        return
    try:
        result = measured(arguments)
    except ValueError as error:
        parser.error(str(error))
    STORED.mkdir(parents=True, exist_ok=True)
    write_json(STORED / f"{arguments.what}.json", result)
    print(json.dumps(result)[:400])


if __name__ == "__main__":
    main()
