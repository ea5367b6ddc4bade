"""Prints the least time of a step on GPUs, stage by stage, and the bytes of our kernels.

    python benchmarks/roofline.py [--document docs/gpu.md]

Nothing of it is measured: ``fusedrec_torchrec/planner/cost/roofline.py`` says where numbers are
from.
"""

import argparse
from pathlib import Path

from ranks import write_into

from fusedrec_torchrec.access.row_classes import RowClasses
from fusedrec_torchrec.bench.report import Table
from fusedrec_torchrec.core.config import from_mapping, load_yaml
from fusedrec_torchrec.core.gpu.traffic import kernels
from fusedrec_torchrec.planner.cost.cluster import ClusterConfig
from fusedrec_torchrec.planner.cost.roofline import GPUS, estimated_rates, roofline, shape_of
from fusedrec_torchrec.planner.cost.table_load import TableLoad

ROOT = Path(__file__).parents[1]
SYSTEMS = ("fused_row_wise", "table_wise")
TABLES, ROWS, DIM, ZIPF = 26, 1_000_000, 64, 1.1
# Ids of a bag, and samples of a rank.
WORKLOADS = {"one id per bag": (1.0, 8192), "bags of 10 ids": (10.0, 2048)}
REFERENCE = "one id per bag"  # whose rates are in configs/clusters


def tables_of(workload: str) -> tuple[list[TableLoad], int]:
    """Returns the tables of a workload, and the samples of a rank."""
    pooling, batch = WORKLOADS[workload]
    classes = RowClasses.zipf(ROWS, ZIPF)
    return [TableLoad(f"t{i}", ROWS, DIM, pooling, classes) for i in range(TABLES)], batch


def cluster_of(gpu: str) -> ClusterConfig:
    """Returns the cluster file of a GPU."""
    path = ROOT / "configs" / "clusters" / f"{gpu}_infiniband.yaml"
    return from_mapping(ClusterConfig, load_yaml(path), path.name)


def rates_of(gpu: str, system: str) -> dict[str, float]:
    """Returns the rates that belong into a cluster file."""
    return estimated_rates(system, *tables_of(REFERENCE), cluster_of(gpu), GPUS[gpu])


def stages() -> Table:
    """Returns the microseconds of all stages."""
    rows: list[tuple[str, ...]] = []
    for workload in WORKLOADS:
        tables, batch = tables_of(workload)
        for gpu in GPUS:
            cluster = cluster_of(gpu)
            for system in SYSTEMS:
                times = roofline(system, tables, batch, cluster, GPUS[gpu])
                total = sum(time.seconds for time in times)
                for time in times:
                    amount = f"{time.amount / 1e6:.2f} MB"
                    if time.name == "launches":
                        amount = f"{time.amount:.0f}"
                    name = f"{time.name} (sent)" if time.is_collective else time.name
                    rows.append((workload, gpu, system, name, amount, f"{1e6 * time.seconds:.0f}"))
                rows.append((workload, gpu, system, "**all**", "", f"**{1e6 * total:.0f}**"))
    return Table("", ("workload", "GPU", "sharding", "stage", "bytes", "us"), rows)


def traffic() -> Table:
    """Returns the bytes of our kernels: as asked, every element once, and at least."""
    rows: list[tuple[str, ...]] = []
    for workload in WORKLOADS:
        counted = kernels(shape_of(*tables_of(workload)))
        rows += [(workload, k.kernel, *_cells(k.asked, k.once, k.least)) for k in counted]
        asked, once, least = ratios(workload, in_all=True)
        rows.append((workload, "**all**", *(f"**{c}**" for c in _cells(asked, once, least))))
    columns = ("workload", "kernel", "MB asked", "once", "least", "asked / least", "once / least")
    return Table("", columns, rows)


def ratios(workload: str, in_all: bool = False) -> tuple[float, float, float]:
    """Returns bytes of all kernels: asked, once and least; in units of the least, or ``in_all``."""
    counted = kernels(shape_of(*tables_of(workload)))
    least = sum(one.least for one in counted)
    unit = 1.0 if in_all else least
    return sum(k.asked for k in counted) / unit, sum(k.once for k in counted) / unit, least / unit


def _cells(asked: float, once: float, least: float) -> list[str]:
    sizes = [f"{size / 1e6:.2f}" for size in (asked, once, least)]
    return [*sizes, *(f"{size / least:.2f}" if least else "-" for size in (asked, once))]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--document", type=Path)
    document = parser.parse_args().document
    for name, table in (("roofline", stages()), ("traffic", traffic())):
        if document is None:
            print(table.markdown(), end="\n\n")
        else:
            write_into(document, name, table.markdown())
    for gpu in GPUS:
        for system in SYSTEMS:
            print(gpu, system, rates_of(gpu, system))


if __name__ == "__main__":
    main()
