"""Cost model: sums over layers, measured entries before rooflines, bytes, the tied parameter."""

import pytest

from spipe.hardware import HardwareSpec, MeasuredLayer, load_hardware
from spipe.model import ModelSpec, PassName, load_model
from spipe.ops import Kind
from spipe.plan import make_plan
from spipe.sim.cost import CostModel
from spipe.sim.pricing import Pricing, op_costs
from spipe.sim.resources import Flow, FlowSpec, max_min_rates

MODEL = load_model("llama2-7b")
H200 = load_hardware("h200x1")


def cost_model(hardware: HardwareSpec = H200, model: ModelSpec = MODEL, size: int = 2) -> CostModel:
    return CostModel(model, hardware, "bf16", sequence=2048, microbatch_size=size)


def measured(seconds: float, pass_name: str = "forward", size: int = 2) -> MeasuredLayer:
    return MeasuredLayer(
        layer_kind="block", pass_name=pass_name, microbatch_size=size, sequence=2048, dtype="bf16",
        seconds=seconds, **MeasuredLayer.shape_of(MODEL, "block"),
    )  # fmt: skip


def test_a_block_takes_what_was_measured_on_an_h200() -> None:
    costs = cost_model()
    assert costs.layer_s("block", "forward") == pytest.approx(2.96e-3, rel=0.1)
    both = costs.layer_s("block", "recompute") + costs.layer_s("block", "backward")
    assert both == pytest.approx(9.23e-3, rel=0.15)
    assert costs.notes == ("not calibrated for any layer (bf16, 2 x 2048 tokens) on h200x1: estimated from peak rates",)


def test_recompute_takes_as_long_as_forward_and_backward_twice_and_the_gradients() -> None:
    costs = cost_model()
    for kind in ("block", "head"):
        forward = costs.layer_s(kind, "forward")
        assert costs.layer_s(kind, "recompute") == forward
        gradients = 2 * 2 * MODEL.layer_num_parameters(kind) / H200.accelerator.memory_bandwidth_bytes_per_s
        assert costs.layer_s(kind, "backward") == pytest.approx(2 * forward + gradients)


def test_a_measured_entry_is_used_as_it_is() -> None:
    costs = cost_model(H200.replace(measured=(measured(0.123),)))
    assert costs.layer_s("block", "forward") == 0.123
    assert "block forward" not in " ".join(costs.notes).split(":")[0].split(", ")


def test_another_microbatch_is_scaled_and_said() -> None:
    costs = cost_model(H200.replace(measured=(measured(0.1, size=1), measured(0.2, size=2))), size=4)
    assert 0.3 < costs.layer_s("block", "forward") <= 0.4
    assert any("scaled to 4 x 2048" in note for note in costs.notes)


def test_a_stage_is_the_sum_of_its_layers() -> None:
    costs = cost_model()
    expected = costs.layer_s("embedding", "forward") + 2 * costs.layer_s("block", "forward")
    assert costs.stage_s(range(3), "forward") == pytest.approx(expected)


@pytest.mark.parametrize("hardware", ["h200x1", "laptop", "ideal"])
@pytest.mark.parametrize("pass_name", ["forward", "recompute", "backward"])
def test_parts_of_a_split_block_take_as_long_as_the_block(hardware: str, pass_name: PassName) -> None:
    spec = load_hardware(hardware)
    costs, split = cost_model(spec), cost_model(spec, MODEL.replace(split_blocks=True))
    parts = [split.layer_s(part, pass_name) for part in ("attention", "mlp")]
    assert min(parts) > 0
    assert sum(parts) == pytest.approx(costs.layer_s("block", pass_name), rel=1e-12)
    assert split.layer_costs()[0] == costs.layer_costs()[0]


def test_a_measured_block_is_shared_out_and_measured_parts_add_up() -> None:
    block = H200.replace(measured=(measured(0.123),))
    split = cost_model(block, MODEL.replace(split_blocks=True))
    attention, mlp = (split.layer_s(part, "forward") for part in ("attention", "mlp"))
    assert attention + mlp == pytest.approx(0.123)
    assert mlp > attention  # of the operations of this model
    assert any("a share of the measured block" in note for note in split.notes)
    entries = tuple(
        measured(0.1).replace(layer_kind=part, **MeasuredLayer.shape_of(MODEL, part)) for part in ("attention", "mlp")
    )
    whole = cost_model(H200.replace(measured=entries))
    assert whole.layer_s("block", "forward") == pytest.approx(0.2)
    assert any("the sum of its measured parts" in note for note in whole.notes)
    assert cost_model(H200.replace(measured=entries), split.model).layer_s("mlp", "forward") == 0.1


def test_what_issuing_takes_bounds_parts_as_it_does_blocks() -> None:
    slow = H200.replace(accelerator=H200.accelerator.replace(layer_issue_s={"forward": 1.0}))
    split = cost_model(slow, MODEL.replace(split_blocks=True))
    assert sum(split.layer_s(part, "forward") for part in ("attention", "mlp")) == pytest.approx(1.0)


def test_a_stage_takes_no_less_than_its_host_needs_for_the_op_and_its_layers() -> None:
    issue = {"layer_issue_s": {"forward": 1.0, "recompute": 2.0, "backward": 1.0},
             "op_issue_s": {"forward": 0.5, "recompute": 0.25}}  # fmt: skip
    late = cost_model(H200.replace(accelerator=H200.accelerator.replace(**issue)))
    blocks = range(1, 4)
    assert late.layer_s("block", "forward") == 1.0
    assert late.stage_s(blocks, "forward") == 3.5
    assert late.stage_s(blocks, "recompute") + late.stage_s(blocks, "backward") == pytest.approx(9.25)
    # Where the device needs long for the backward, a host that was late with the recompute is ahead again.
    for backward_s, both_s in ((2.9, 9.25), (3.5, 10.5 + 3 * 0.1)):
        entries = tuple(
            measured(seconds).replace(pass_name=name)
            for name, seconds in (("forward", 0.1), ("recompute", 0.1), ("backward", backward_s))
        )
        mixed = cost_model(H200.replace(accelerator=H200.accelerator.replace(**issue), measured=entries))
        recompute, backward = (mixed.stage_s(blocks, name) for name in ("recompute", "backward"))
        assert recompute + backward == pytest.approx(both_s)
        assert backward == pytest.approx(3 * backward_s)
        assert recompute >= 3 * 0.1 - 1e-9
        assert mixed.device_s("block", "backward") == backward_s


def test_stages_that_are_replayed_take_what_the_device_needs_and_their_copies() -> None:
    issue = {"layer_issue_s": {"forward": 1.0}, "op_issue_s": {"forward": 0.5}, "launch_overhead_s": 1e-4}
    hardware = H200.replace(accelerator=H200.accelerator.replace(**issue))
    plans = [
        make_plan(MODEL, hardware, num_ranks=1, forward_stages=4, backward_stages=4, global_batch=4,
                  microbatch_size=1, sequence=2048, precision="bf16", cuda_graphs=recorded)
        for recorded in (False, True)
    ]  # fmt: skip
    slow, fast = (CostModel.of(plan) for plan in plans)
    device_s = fast.device_s("block", "forward")
    assert slow.stage_s(range(1, 3), "forward") == 2.5
    assert fast.stage_s(range(1, 3), "forward") == pytest.approx(2 * device_s)
    ends = range(2), range(MODEL.num_total_layers - 2, MODEL.num_total_layers)
    assert [fast.stage_s(layers, "forward") for layers in ends] == [slow.stage_s(layers, "forward") for layers in ends]
    program = plans[1].program()
    i = next(i for i, stage in enumerate(program.stage) if stage == 1 and program.kind[i] == Kind.FORWARD)
    moved = 6 * fast.boundary_bytes() / hardware.accelerator.memory_bandwidth_bytes_per_s
    expected = fast.stage_s(program.layers(1), "forward") + moved
    assert Pricing(fast, program).price(i)[0] == pytest.approx(expected)


def test_an_optimizer_that_need_not_undo_is_faster_where_a_profile_says_so() -> None:
    hardware = H200.replace(cpu=H200.cpu.replace(undo_slowdown=1.25, memory_bandwidth_bytes_per_s=1e15))
    rates = {}
    for optimizer in ("async", "sync"):
        plan = make_plan(MODEL, hardware, num_ranks=1, global_batch=4, microbatch_size=1, sequence=2048,
                         options={"optimizer": optimizer})  # fmt: skip
        rates[optimizer] = CostModel.of(plan).adam_rate
    assert rates["async"] == pytest.approx(hardware.cpu.adam_parameters_per_s)
    assert rates["sync"] == pytest.approx(1.25 * rates["async"])


def test_a_recompute_is_shorter_by_the_product_that_only_its_output_needs() -> None:
    fields = {"num_ranks": 1, "forward_stages": 4, "backward_stages": 4, "global_batch": 4, "microbatch_size": 1,
              "sequence": 2048, "precision": "bf16"}  # fmt: skip
    plan = make_plan(MODEL, H200, **fields)  # type: ignore[arg-type]
    block = MODEL.layer_forward_flops("block", 1, 2048, causal=True)
    share = 2 * 2048 * MODEL.ffn_size * MODEL.hidden_size / block
    assert 0.1 < share < 0.4
    shorter = CostModel.of(plan)
    whole = CostModel.of(make_plan(MODEL, H200, published=True, **fields))  # type: ignore[arg-type]
    block_s = whole.device_s("block", "recompute")
    assert shorter.stage_s(range(1, 4), "recompute") == pytest.approx((3 - share) * block_s)
    assert whole.stage_s(range(1, 4), "recompute") == pytest.approx(3 * block_s)
    for name in ("forward", "backward"):
        assert shorter.stage_s(range(1, 4), name) == whole.stage_s(range(1, 4), name)  # type: ignore[arg-type]
    top = range(MODEL.num_total_layers - 2, MODEL.num_total_layers)
    for layers in (top, range(1)):
        assert shorter.stage_s(layers, "recompute") == whole.stage_s(layers, "recompute")
    assert CostModel.of(plan.replace(dropout=0.1)).unseen(range(2)) == 0
    assert CostModel.of(plan.replace(compile_layers=True)).unseen(range(2)) == 0
    assert MODEL.output_share("mlp", 2048) == pytest.approx(1 / 3)


def test_ideal_costs_are_exact_constants() -> None:
    costs = cost_model(load_hardware("ideal"))
    assert costs.stage_s(range(MODEL.num_total_layers), "forward") == pytest.approx(32e-3, rel=1e-15)
    assert costs.layer_s("block", "backward") == 2e-3
    assert costs.layer_s("head", "forward") == costs.layer_s("embedding", "backward") == 0.0
    assert costs.notes == ()


def test_the_optimizer_and_copies_slow_down_alike_where_memory_is_short() -> None:
    plan = make_plan(load_model("llama2-7b"), load_hardware("h200x1"), forward_stages=16, backward_stages=33,
                     global_batch=8, microbatch_size=1, sequence=2048, precision="bf16")  # fmt: skip
    short = plan.hardware.override({"cpu.memory_bandwidth_gb_per_s": 150})
    program, costs = plan.program(), op_costs(CostModel.of(plan, short), plan.program())
    step, fetch = (
        next(costs.flows[i] for i, k in enumerate(program.kind) if k == kind and costs.flows[i])
        for kind in (Kind.STEP, Kind.FETCH)
    )
    assert step is not None
    assert fetch is not None
    flows = [Flow(step, 0.0), Flow(fetch, 0.0)]
    memory = max(resource for resource, _ in fetch.uses)
    rates = max_min_rates(flows, [memory], costs.capacities)
    taken = {flow: rate * dict(flow.uses)[memory] for flow, rate in rates.items()}
    assert sum(taken.values()) == pytest.approx(150e9)
    assert rates[flows[0]] == pytest.approx(rates[flows[1]], rel=0.1)


def test_copies_share_a_link_byte_for_byte() -> None:
    """However fast each of them would be alone."""
    slow, fast = (Flow(FlowSpec(1.0, 1.0, 1 / rate, ((0, rate),)), 0.0) for rate in (20e9, 50e9))
    rates = max_min_rates([slow, fast], [0], [60e9])
    assert [20e9 * rates[slow], 50e9 * rates[fast]] == pytest.approx([20e9, 40e9])
    rates = max_min_rates([slow, fast], [0], [30e9])
    assert [20e9 * rates[slow], 50e9 * rates[fast]] == pytest.approx([15e9, 15e9])


def test_a_small_microbatch_is_less_efficient() -> None:
    assert cost_model(size=1).layer_s("block", "forward") > cost_model(size=2).layer_s("block", "forward") / 2


def test_grouped_query_attention_is_cheaper() -> None:
    grouped = MODEL.replace(num_kv_heads=4)
    assert cost_model(model=grouped).layer_s("block", "forward") < cost_model().layer_s("block", "forward")


def test_the_tied_parameter_is_stepped_once_with_the_embedding() -> None:
    model = load_model("qwen3-1.7b")
    costs = cost_model(model=model)
    last = model.num_total_layers
    assert costs.num_stepped_parameters(range(last)) == model.num_parameters()
    assert costs.num_stepped_parameters(range(last - 1, last)) == model.hidden_size
    assert costs.num_parameters(range(last - 1, last)) > model.vocab_size * model.hidden_size


def test_bytes_and_rates_of_a_plan() -> None:
    plan = make_plan(
        MODEL, H200, forward_stages=4, backward_stages=4, global_batch=2, microbatch_size=1, sequence=1024,
        options={"bucket_layers": 0},
    )  # fmt: skip
    program = plan.program()
    costs = CostModel.of(plan)
    priced = op_costs(costs, program)
    for i, kind in enumerate(program.kind):
        parameters = costs.num_parameters(program.layers(program.stage[i]))
        if kind in (Kind.FETCH, Kind.OFFLOAD_GRAD):
            assert priced.seconds[i] == pytest.approx(2 * parameters / 55e9 + 10e-6)
        if kind == Kind.STEP:
            assert priced.seconds[i] == pytest.approx(parameters / 3.9e9 + 50e-6)


def test_optimizers_of_a_host_share_its_cores() -> None:
    host = load_hardware("h200x4")
    one = CostModel(MODEL, host, "bf16", sequence=2048, microbatch_size=1, ranks_per_host=1)
    four = CostModel(MODEL, host, "bf16", sequence=2048, microbatch_size=1, ranks_per_host=4)
    assert one.adam_rate == pytest.approx(4 * four.adam_rate)
