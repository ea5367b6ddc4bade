"""``fusedrec plan`` decides how tables are sharded, says why, and writes a plan for training."""

import argparse
import json
from pathlib import Path
from typing import Any

from fusedrec_torchrec.cli.json_output import add_json, print_json
from fusedrec_torchrec.cli.manual import add_parser
from fusedrec_torchrec.cli.outputs import output_file
from fusedrec_torchrec.core.terminal import print_table
from fusedrec_torchrec.planner.config import PlannerConfig, schema
from fusedrec_torchrec.sharding.plan_diff import differences
from fusedrec_torchrec.sharding.plan_file import read_plan
from fusedrec_torchrec.training.planner_files import read_planner_files

__all__ = ["add_command"]

DIFFERENT = 1
EXAMPLES = {
    "fusedrec plan --config configs/planner/tiny.yaml --out plans/two.yaml": "Explains a plan, "
    "and writes it for training.",
    "fusedrec plan --config configs/planner/tiny.yaml --ranks 4 --quiet --out plans/4.yaml": "Is "
    "silent, for more ranks.",
    "fusedrec plan --config configs/planner/tiny.yaml --html plans/report.html": "Draws a report "
    "for a browser.",
    "fusedrec plan diff plans/two.yaml plans/two.yaml": "Shows what differs between two plans; "
    "exit code 1 if anything does.",
}


def add_command(commands: Any) -> None:
    """Adds the subcommand and its arguments to those of ``fusedrec``."""
    parser = add_parser(
        commands,
        "plan",
        usage="fusedrec plan --config FILE [options]\n"
        "       fusedrec plan diff A.yaml B.yaml\n"
        "       fusedrec plan schema",
        purpose="Decides by a cost model how the tables of a model are sharded on a cluster, "
        "explains it, and writes a plan file that training loads (plan: plan.yaml).  `plan diff` "
        "shows what is different between two plan files (exit code 1 if anything is), `plan "
        "schema` prints the JSON Schema of configuration files for editors.",
        examples=EXAMPLES,
        read_on="docs/planner.md",
        settings=PlannerConfig,
    )
    parser.add_argument("what", nargs="*", metavar="diff A B | schema", help=argparse.SUPPRESS)
    parser.add_argument("--config", type=Path, help="what to plan (configs/planner/*.yaml)")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="overrides one setting, may be given several times",
    )
    parser.add_argument("--ranks", type=int, default=None, help="plans for so many ranks")
    parser.add_argument("--out", type=output_file, default=None, help="writes the plan (.yaml)")
    parser.add_argument(
        "--html", type=output_file, default=None, help="writes a report for a browser"
    )
    parser.add_argument("--quiet", action="store_true", help="explains nothing")
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Plans, or does what the words without a flag say."""
    if arguments.what:
        return _other(arguments.what, arguments.json)
    if arguments.config is None:
        raise ValueError("--config is missing: what to plan, such as configs/planner/tiny.yaml")
    overrides = list(arguments.set)
    if arguments.ranks is not None:
        overrides.append(f"ranks={arguments.ranks}")
    files = read_planner_files(arguments.config, overrides)

    from fusedrec_torchrec.planner.fit_tables import unfit_tables
    from fusedrec_torchrec.planner.report.explain import Explanation, print_explanation
    from fusedrec_torchrec.planner.report.figures import figures_of
    from fusedrec_torchrec.planner.write import write_decision
    from fusedrec_torchrec.training.planning import planning_of

    planning = planning_of(files, progress=not arguments.quiet)
    decision = planning.decide()
    explains = not arguments.quiet and not arguments.json
    if explains or arguments.json or arguments.html is not None:
        unfit = sorted(unfit_tables(planning.model, planning.sharders, planning.cluster.device))
        explanation = Explanation(decision, planning.config.search, unfit)
        if explains:
            print_explanation(explanation)
        if arguments.json:
            print_json(figures_of(explanation))
        if arguments.html is not None:
            from fusedrec_torchrec.planner.report.html_report import write_report

            arguments.html.parent.mkdir(parents=True, exist_ok=True)
            write_report(arguments.html, explanation)
            print(f"report: {arguments.html}")
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        write_decision(arguments.out, planning, decision)
        print(f"plan: {arguments.out}")
    return 0


def _other(words: list[str], as_json: bool) -> int:
    if words == ["schema"]:
        if as_json:
            print_json(schema())
        else:
            print(json.dumps(schema(), indent=2))
        return 0
    if words[0] != "diff" or len(words) != 3:
        raise ValueError(
            f"{' '.join(words)!r} is unknown; allowed: `plan --config FILE`, `plan diff A.yaml "
            "B.yaml`, `plan schema`"
        )
    (first, _), (second, _) = (read_plan(Path(word)) for word in words[1:])
    rows = list(differences(first, second))
    if as_json:
        names = ("what", "first", "second")
        print_json({"differences": [dict(zip(names, row, strict=True)) for row in rows]})
        return DIFFERENT if rows else 0
    if not rows:
        print("no difference")
        return 0
    print_table("differences", ("", *words[1:]), rows)
    return DIFFERENT
