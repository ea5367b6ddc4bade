"""Training with codecs, on real ranks: within their stated errors, in as few bytes as they say."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchrec.distributed.fbgemm_qcomm_codec import (
    CommType,
    QCommsConfig,
    get_qcomm_codecs_registry,
)
from torchrec.distributed.types import CommOp, QuantizedCommCodecs

import fusedrec_torchrec as fr
from fusedrec_torchrec.codecs.dct import DctCodec
from fusedrec_torchrec.core.collective_counter import CollectiveCounter
from tests.case import (
    Case,
    Table,
    batch,
    initial_weight,
    local_device,
    prefix,
    sharded,
    unsharded,
)
from tests.cluster import Cluster
from tests.parity import (
    bound_of_sum,
    check,
    close,
    local_parts,
    optimizer_states,
    train_step,
)
from tests.reference import unsharded_run

TABLES = (
    Table("a", 50, dim=16, features=("f", "g")),
    Table("b", 31, dim=8, pooling="mean"),
    Table("c", 40, dim=16),
)
OWNERS_POOL = (
    dataclasses.replace(TABLES[0], sharding="fused_column_wise"),
    dataclasses.replace(TABLES[1], sharding="fused_table_wise"),
    TABLES[2],
)
CASES = {
    "ebc": Case(TABLES, (6, 9), integers=False),
    "ebc weighted": Case((TABLES[0], TABLES[2]), (6, 9), integers=False, weighted=True),
    "ec": Case(
        (Table("a", 50, dim=16, features=("f", "g")), Table("c", 40, dim=16)),
        (6, 9),
        integers=False,
        kind="ec",
    ),
    "vbe": Case(TABLES, (6, 9), integers=False, vbe=True),
    "exact counts": Case(TABLES, (6, 9), integers=False, input_dist="exact_counts"),
    "no samples": Case(TABLES, (0, 5), integers=False),
    "hot": Case(
        (dataclasses.replace(TABLES[0], hot=(0, 1, 2)), *TABLES[1:]), (6, 9), integers=False
    ),
    "rowwise adagrad": Case(TABLES, (6, 9), integers=False, optimizer="rowwise_adagrad"),
    "owners pool": Case(OWNERS_POOL, (6, 9), integers=False, repeated=True),
    "owners pool vbe": Case(OWNERS_POOL, (6, 9), integers=False, vbe=True),
    "owners pool weighted": Case(
        (OWNERS_POOL[0], OWNERS_POOL[2]), (6, 9), integers=False, weighted=True, repeated=True
    ),
}
# Largest error of a number, relative to the largest of its row.
ERRORS = {"fp16": 2.0**-11, "bf16": 2.0**-8, "int8": 1 / 255}


def codecs(forward: Any, backward: Any) -> fr.Codecs:
    return fr.Codecs(forward=fr.CodecOptions(type=forward), backward=fr.CodecOptions(type=backward))


def options(case: Case, given: fr.Codecs) -> fr.ExchangeOptions:
    return fr.ExchangeOptions(input_dist=case.input_dist, codecs=given)


def train_within(case: Case, forward: str, backward: str) -> None:
    """Outputs of the first step, and what is left after the last.

    The loss is linear in the outputs, so gradients do not depend on what arrived forward.
    """
    run = unsharded_run(case, dist.get_world_size())
    model = sharded(case, options(case, codecs(forward, backward)))
    outputs = [train_step(case, model, step) for step in range(case.steps)]
    largest = max(float(initial_weight(case, i).abs().max()) for i in range(len(case.tables)))
    for name, want in run.outputs[0][dist.get_rank()].items():
        bags = 2 * max(case.lengths) if case.kind != "ec" else 1  # a feature may come twice
        bound = ERRORS.get(forward, 0.0) * bags * largest + bound_of_sum(64, 4 * largest)
        close(outputs[0][name], want, bound, f"output {name}")
    if case.batch_sizes[dist.get_rank()]:
        wanted = run.outputs[0][dist.get_rank()]
        assert any(not torch.equal(outputs[0][name].cpu(), wanted[name]) for name in wanted)
    state = model.state_dict()
    error = ERRORS.get(backward, 0.0)
    for t in case.tables:
        for where, part in local_parts(state[f"sparse.{prefix(case)}.{t.name}.weight"]):
            want = run.weights[t.name][where]
            if case.optimizer == "sgd":
                sums = run.sums[t.name][where]
                if backward == "int8" and sums.numel():
                    sums = sums.amax(1, keepdim=True)
                bound = case.learning_rate * (error + 1e-5) * sums + 1e-5
            else:  # gradients have one sign: a relative error, at most three times in a step
                bound = 3 * case.learning_rate * case.steps * (2 * error + 1e-4)
            close(part, want, bound, f"weight of {t.name}")
        if run.states[t.name] is not None:
            for where, part in local_parts(optimizer_states(model)[t.name]):
                want = run.states[t.name][where[:1]]  # type: ignore[index]
                bound = (4 * error + 1e-4) * want.abs()
                close(part.view_as(want), want, bound, f"state of {t.name}")


SLOW = pytest.mark.slow
OF_ALL = [("bf16", "bf16", name) for name in CASES]
OF_SOME = [
    pytest.param(*both, name, marks=[] if name in ("ebc", "hot", "owners pool") else SLOW)
    for both in (("fp16", "int8"), ("int8", "fp16"))
    for name in CASES
]


@pytest.mark.parametrize(("forward", "backward", "name"), [*OF_ALL, *OF_SOME])
def test_training_is_off_by_no_more_than_the_codec(
    cluster_2: Cluster, name: str, forward: str, backward: str
) -> None:
    cluster_2.run(train_within, CASES[name], forward, backward)


def train_alike(case: Case, given: fr.Codecs) -> None:
    """To the last bit like training without codecs."""
    models = [sharded(case, options(case, each)) for each in (fr.Codecs(), given)]
    for step in range(case.steps):
        plain, coded = (train_step(case, model, step) for model in models)
        for name in plain:
            assert torch.equal(plain[name], coded[name])
    states = [model.state_dict() for model in models]
    for key in states[0]:
        for (_, one), (_, other) in zip(
            *(local_parts(state[key]) for state in states), strict=True
        ):
            assert torch.equal(one, other), key
    for name, value in optimizer_states(models[0]).items():
        other_parts = local_parts(optimizer_states(models[1])[name])
        for (_, one), (_, other) in zip(local_parts(value), other_parts, strict=True):
            assert torch.equal(one, other), name


@pytest.mark.parametrize("name", ["ebc", "ec", "hot", "rowwise adagrad", "owners pool"])
def test_dct_of_all_entries_is_training_without(cluster_2: Cluster, name: str) -> None:
    given = fr.Codecs(forward=fr.CodecOptions(type="dct", density=1.0))
    cluster_2.run(train_alike, CASES[name], given)


def train_alike_entry_by_entry(case: Case) -> None:
    """All entries reach a threshold of zero: they go their own way, and arrive as they were."""
    given = fr.Codecs(forward=fr.CodecOptions(type="dct", density=0.97, relative=False))
    plain, coded = (sharded(case, options(case, each)) for each in (fr.Codecs(), given))
    for codec in coded.module.sparse.fused.wires[0].codecs:
        codec.threshold.load([torch.zeros(2)])
    for step in range(case.steps):
        one, other = (train_step(case, model, step) for model in (plain, coded))
        for name in one:
            assert torch.equal(one[name], other[name])
    states = plain.state_dict(), coded.state_dict()
    for key in states[0]:
        for (_, a), (_, b) in zip(*(local_parts(state[key]) for state in states), strict=True):
            assert torch.equal(a, b), key


@pytest.mark.parametrize("name", CASES)
def test_entries_find_their_places(cluster_2: Cluster, name: str) -> None:
    cluster_2.run(train_alike_entry_by_entry, CASES[name])


def thresholds_of_evaluations(case: Case) -> None:
    forward = fr.CodecOptions(type="dct", density=0.3, every=2)
    model = sharded(case, options(case, fr.Codecs(forward=forward)))
    (codec, *_) = model.module.sparse.fused.wires[0].codecs
    train_step(case, model, 0)
    before = codec.threshold.state()
    with torch.no_grad():
        for step in range(1, 5):
            model(batch(case, step, dist.get_rank()))
    assert torch.equal(codec.threshold.state(), before)
    train_step(case, model, 5)
    assert not torch.equal(codec.threshold.state(), before)


def test_evaluations_leave_thresholds_alone(cluster_2: Cluster) -> None:
    cluster_2.run(thresholds_of_evaluations, CASES["ebc"])


def forced(case: Case) -> None:
    """The machinery of bytes itself changes nothing: one table's codec is not exact."""
    given = fr.ExchangeOptions(table_codecs={"b": codecs("bf16", "bf16")})
    run = unsharded_run(case, dist.get_world_size())
    model = sharded(case, given)
    assert len(model.module.sparse.fused.layout.buckets) == 2
    outputs = [train_step(case, model, step) for step in range(case.steps)]
    only = dataclasses.replace(case, tables=tuple(t for t in case.tables if t.name != "b"))
    features = {f for t in only.tables for f in t.feature_names}
    run.outputs = [
        [{n: o for n, o in rank.items() if n in features} for rank in step] for step in run.outputs
    ]
    check(only, run, [{n: o for n, o in s.items() if n in features} for s in outputs], model)


def test_other_tables_stay_exact(cluster_2: Cluster) -> None:
    case = Case((Table("a", 50, dim=16), Table("b", 31, dim=16), Table("c", 40, dim=16)), (6, 9))
    cluster_2.run(forced, case)


def only_the_largest(case: Case, density: float, values: Any) -> None:
    """Entries of the rows that reach their owner's tau are seen and trained, others are not."""
    rank, world = dist.get_rank(), dist.get_world_size()
    forward = fr.CodecOptions(type="dct", density=density, values=values, relative=False)
    model = sharded(case, options(case, fr.Codecs(forward=forward)))
    got = train_step(case, model, 0)
    fused = model.module.sparse.fused
    table, weight = case.tables[0], initial_weight(case, 0)
    codec = fused.wires[0].codecs[0]
    assert isinstance(codec, DctCodec)
    own = codec.threshold.state()[:1].float().to(local_device(case))
    taus = [torch.empty_like(own) for _ in range(world)]
    dist.all_gather(taus, own)
    owner = torch.arange(table.rows) // -(-table.rows // world)
    travels = weight.abs() >= torch.cat(taus).cpu()[owner][:, None]
    seen = torch.where(travels, weight, 0.0)
    if values == "bf16":
        seen = seen.bfloat16().float()
    reference = unsharded(case, "cpu")
    with torch.no_grad():
        dict(reference.named_parameters())[f"{prefix(case)}.{table.name}.weight"].copy_(seen)
        want = reference(batch(case, 0, rank)).to_dict()
    for name in want:
        assert torch.allclose(got[name].cpu(), want[name], atol=1e-5), name
    # Where an entry travelled, the update is that of training without a codec.
    run = unsharded_run(dataclasses.replace(case, steps=1), world)
    key = f"sparse.{prefix(case)}.{table.name}.weight"
    for where, part in local_parts(model.state_dict()[key]):
        expected = torch.where(travels, run.weights[table.name], weight)[where]
        assert torch.allclose(part.cpu(), expected, atol=1e-5)
        assert not torch.equal(part.cpu(), weight[where])


@pytest.mark.parametrize("values", ["fp32", "bf16"])
def test_only_the_largest_entries_travel_and_are_trained(cluster_2: Cluster, values: str) -> None:
    # Enough slack that no message overflows: all rows in every batch.
    case = Case((Table("a", 30, dim=16),), (60, 60), integers=False, skew=0.0, lengths=(4,))
    cluster_2.run(only_the_largest, case, 0.4, values)


def traffic(case: Case, given: fr.ExchangeOptions) -> list[tuple[str, str, int]]:
    model = sharded(case, given)
    train_step(case, model, 0)
    with CollectiveCounter() as counter:
        train_step(case, model, 1)
    return [(c.name, str(c.dtype), c.bytes_sent) for c in counter.collectives]


def test_three_collectives_and_the_bytes_that_codecs_promise(cluster_2: Cluster) -> None:
    tables = tuple(Table(f"t{i}", 400, dim=64) for i in range(3))
    case = Case(tables, (300, 200), integers=False)
    found = {}
    for name, given in {
        "fp32": None,
        "bf16": codecs("bf16", "bf16"),
        "int8": codecs("int8", "int8"),
        "dct": fr.Codecs(
            forward=fr.CodecOptions(type="dct", density=0.05, values="bf16"),
            backward=fr.CodecOptions(type="bf16"),
        ),
    }.items():
        of_ranks = cluster_2.run(traffic, case, fr.ExchangeOptions(codecs=given))
        for collectives in of_ranks:
            assert [c[0] for c in collectives] == ["all_to_all"] * 3, name
            assert collectives[0][1] == "torch.int32"
        found[name] = sum(c[2] for collectives in of_ranks for c in collectives[1:])
    assert found["fp32"] == 2 * found["bf16"]
    assert found["fp32"] >= 3.5 * found["int8"]
    assert found["fp32"] >= 20 * found["dct"]


# ---------------------------------------------------------------- TorchRec's settings


def sharded_with_registry(case: Case, registry: Any, given: fr.ExchangeOptions | None) -> Any:
    sharders = fr.fused_sharders(
        fused_params={"learning_rate": case.learning_rate},
        qcomm_codecs_registry=registry,
        options=given,
    )
    from torchrec.distributed.sharding_plan import construct_module_sharding_plan
    from torchrec.distributed.types import ShardingPlan

    from tests.case import Wrapper, parallel

    module = unsharded(case)
    sharder = next(s for s in sharders if s.module_type is type(module))
    plan = construct_module_sharding_plan(
        module,
        {t.name: fr.fused_row_wise() for t in case.tables},
        sharder=sharder,
        local_size=2,
        world_size=2,
        device_type="cpu",
    )
    return parallel(Wrapper(module), ShardingPlan({"sparse": plan}), sharders)


def bytes_with_registry(
    case: Case, precisions: tuple[str, str], given: fr.ExchangeOptions | None
) -> list[int]:
    forward, backward = (CommType(each) for each in precisions)
    registry = get_qcomm_codecs_registry(
        QCommsConfig(forward_precision=forward, backward_precision=backward),
        device=torch.device("cuda"),  # "cpu" would replace bf16
    )
    model = sharded_with_registry(case, registry, given)
    train_step(case, model, 0)
    with CollectiveCounter() as counter:
        train_step(case, model, 1)
    return [c.bytes_sent for c in counter.collectives[1:]]


@pytest.mark.parametrize("kind", ["ebc", "ec"])
@pytest.mark.parametrize("precisions", [("bf16", "fp32"), ("fp32", "fp16"), ("int8", "bf16")])
def test_a_qcomm_registry_is_honoured(
    cluster_2: Cluster, kind: str, precisions: tuple[str, str]
) -> None:
    case = Case((Table("a", 200, dim=20),), (50, 60), integers=False, kind=kind)
    plain = cluster_2.run(bytes_with_registry, case, ("fp32", "fp32"), None)
    coded = cluster_2.run(bytes_with_registry, case, precisions, None)
    per_number = {"fp32": 4.0, "fp16": 2.0, "bf16": 2.0, "int8": 1 + 8 / 20}
    scale = {"fp32": 0, "fp16": 4, "bf16": 0, "int8": 4}
    for of_plain, of_coded in zip(plain, coded, strict=True):
        for before, after, precision in zip(of_plain, of_coded, precisions, strict=True):
            assert after == before / 4 * per_number[precision] + scale[precision]


def test_codecs_of_the_options_come_before_the_registry(cluster_2: Cluster) -> None:
    case = Case((Table("a", 200, dim=16),), (50, 60), integers=False)
    given = fr.ExchangeOptions(codecs=codecs("fp32", "fp32"))
    plain = cluster_2.run(bytes_with_registry, case, ("fp32", "fp32"), None)
    assert cluster_2.run(bytes_with_registry, case, ("bf16", "bf16"), given) == plain


class Thirds:
    """A codec that a user wrote: float32 in three bytes, after four that say nothing."""

    quantized_dtype = torch.uint8

    def encode(self, numbers: torch.Tensor, ctx: Any = None) -> torch.Tensor:
        kept = numbers.contiguous().view(-1, 1).view(torch.uint8)[:, 1:].reshape(-1)
        return torch.cat([torch.zeros(4, dtype=torch.uint8), kept])

    def decode(self, wire: torch.Tensor, ctx: Any = None) -> torch.Tensor:
        kept = wire[4:].view(-1, 3)
        lost = torch.zeros(len(kept), 1, dtype=torch.uint8)
        return torch.cat([lost, kept], dim=1).view(torch.float32).view(-1)

    def calc_quantized_size(self, numbers: int, ctx: Any = None) -> int:
        return 3 * numbers + 4

    def create_context(self) -> None:
        return None


def with_a_users_codec(case: Case) -> list[int]:
    both: Any = QuantizedCommCodecs(forward=Thirds(), backward=Thirds())
    registry = {CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL.name: both}
    model = sharded_with_registry(case, registry, None)
    key = f"sparse.{prefix(case)}.a.weight"
    model.load_state_dict({key: initial_weight(case, 0)}, strict=False)
    run = unsharded_run(case, dist.get_world_size())
    got = train_step(case, model, 0)
    for name, want in run.outputs[0][dist.get_rank()].items():
        close(got[name], want, 2.0**-15 * 4 * 8, name)
        assert not torch.equal(got[name], want)
    with CollectiveCounter() as counter:
        train_step(case, model, 1)
    return [c.bytes_sent for c in counter.collectives[1:]]


def test_any_codec_of_a_registry_is_taken(cluster_2: Cluster) -> None:
    case = Case((Table("a", 200, dim=16),), (50, 60), integers=False, steps=2)
    plain = cluster_2.run(bytes_with_registry, case, ("fp32", "fp32"), None)
    thirds = cluster_2.run(with_a_users_codec, case)
    assert [[4 * (n - 4) for n in of_rank] for of_rank in thirds] == [
        [3 * n for n in of_rank] for of_rank in plain
    ]


def with_nothing_to_say(case: Case) -> None:
    """One rank asks for no rows at all."""
    both: Any = QuantizedCommCodecs(forward=Thirds(), backward=Thirds())
    registry = {CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL.name: both}
    model = sharded_with_registry(case, registry, None)
    train_step(case, model, 0)


def test_codecs_of_a_registry_and_a_rank_without_rows(cluster_2: Cluster) -> None:
    cluster_2.run(with_nothing_to_say, Case((Table("a", 200, dim=16),), (0, 6), integers=False))


# ---------------------------------------------------------------- what is refused


def error_of(function: Callable[..., Any], *arguments: Any) -> str:
    try:
        function(*arguments)
    except ValueError as error:
        return str(error)
    return ""


def sharded_and_trained(case: Case, given: fr.ExchangeOptions) -> None:
    train_step(case, sharded(case, given), 0)


def test_codecs_that_do_not_work_here_are_refused(cluster_2: Cluster) -> None:
    case = Case((Table("a", 200, dim=16),), (50, 60), integers=False)
    for text in cluster_2.run(error_of, bytes_with_registry, case, ("fp8", "fp32"), None):
        assert "fp8) that fails on cpu for rows of 16 columns" in text
        assert "must be one of fp32, fp16, bf16, int8" in text


def test_codecs_want_float32_rows(cluster_2: Cluster) -> None:
    case = Case((Table("a", 20),), (5, 6), output_dtype="fp16")
    given = fr.ExchangeOptions(codecs=codecs("bf16", "fp32"))
    for text in cluster_2.run(error_of, sharded_and_trained, case, given):
        assert "'a' has codecs and fused_params has output_dtype fp16, must be fp32" in text


def test_a_codec_for_a_table_that_is_not_there_is_an_error(cluster_2: Cluster) -> None:
    case = Case((Table("a", 20),), (5, 6))
    given = fr.ExchangeOptions(table_codecs={"b": codecs("bf16", "bf16")})
    for text in cluster_2.run(error_of, sharded_and_trained, case, given):
        assert "table_codecs names table 'b', must be among" in text


def test_gradients_have_no_threshold_of_their_own() -> None:
    with pytest.raises(ValueError, match=r"backward.type is dct, must be one of"):
        fr.Codecs(backward=fr.CodecOptions(type="dct"))
    with pytest.raises(ValueError, match=r"backward.type is int8 with forward dct, must be one of"):
        fr.Codecs(forward=fr.CodecOptions(type="dct"), backward=fr.CodecOptions(type="int8"))
