"""JiT against the official code, and our own guarantees."""

from __future__ import annotations

import json
import math

import pytest
import torch
from safetensors import safe_open
from scripts.make_golden_jit import COMMIT, GOLDEN, golden_inputs, weights_by_formula
from torch import Tensor

from muralist.core.errors import UserError
from muralist.core.rng import SampleKeys, dropout
from muralist.diffusion import flow, samplers
from muralist.kernels import ops
from muralist.models import jit
from muralist.models.configs import JIT_CONFIGS
from muralist.models.jit import JiT

SMALL = {"hidden_size": 48, "depth": 4, "num_heads": 3, "num_classes": 5, "bottleneck_dim": 8}


def with_formula_weights(net: JiT) -> JiT:
    fixed = net.pos_embed.clone()
    net.load_state_dict(weights_by_formula({name: tuple(value.shape) for name, value in net.state_dict().items()}))
    net.pos_embed.data.copy_(fixed)
    return net.eval()


@pytest.fixture(scope="module", params=["context", "plain"])
def official(request: pytest.FixtureRequest) -> tuple[JiT, dict[str, Tensor], dict]:
    """Our network and what the official code computed with the same weights."""
    with safe_open(GOLDEN, "pt") as file:
        facts = json.loads(file.metadata()[request.param])
        tensors = {name.split(".")[1]: file.get_tensor(name) for name in file.keys() if name.startswith(request.param)}  # noqa: SIM118
    return with_formula_weights(JiT(**facts["arguments"])), tensors, facts


def batch(net: JiT, count: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    keys = SampleKeys(1, torch.arange(count))
    size = net.grid * net.patch_size
    return keys.normal(20, (net.in_channels, size, size)), keys.uniform(21), torch.arange(count) % (net.num_classes + 1)


@pytest.mark.parametrize("case", ["context", "plain"])
def test_golden_file_has_its_origin_and_the_inputs_of_the_script(case):
    with safe_open(GOLDEN, "pt") as file:
        assert file.metadata()["commit"] == COMMIT and len(COMMIT) == 40
        for name, value in golden_inputs(case).items():
            torch.testing.assert_close(file.get_tensor(f"{case}.{name}"), value, atol=1e-6, rtol=1e-5)


def test_official_names_and_shapes(official):
    net, _, facts = official
    assert [[name, list(value.shape)] for name, value in net.state_dict().items()] == facts["state"]
    assert [name for name, parameter in net.named_parameters() if not parameter.requires_grad] == ["pos_embed"]


def test_official_output(official):
    net, golden, _ = official
    output = net(golden["x"], golden["t"], golden["y"])
    assert output.std() > 0.1
    torch.testing.assert_close(output, golden["output"], atol=1e-5, rtol=1e-5)


def test_official_loss_and_gradient(official):
    net, golden, _ = official
    x, e, t, y = (golden[name] for name in "xety")
    net.zero_grad()
    loss = flow.loss("x", "v", net(flow.interpolate(x, e, t), t, y), x, e, t)
    torch.testing.assert_close(loss, golden["loss"], atol=1e-5, rtol=1e-5)
    loss.mean().backward()
    norms = torch.stack([p.grad.norm() for p in net.parameters() if p.requires_grad])
    torch.testing.assert_close(norms, golden["gradient_norms"], atol=1e-6, rtol=1e-4)


def test_official_samples(official):
    net, golden, facts = official
    for name, run in facts["samples"].items():
        settings = samplers.SamplerSettings(
            run["solver"], run["steps"], run["guidance"], tuple(run["interval"]), official_last_step=True
        )
        images = samplers.sample(net, golden["e"], golden["y"], net.num_classes, settings)
        torch.testing.assert_close(images, golden[name], atol=1e-5, rtol=1e-5)


def test_position_embedding_by_definition():
    table = jit.sincos_position_embedding(3, 8)[0].unflatten(0, (3, 3))
    for row in range(3):
        for column in range(3):
            expected = [f(a * w) for a in (column, row) for f in (math.sin, math.cos) for w in (1.0, 0.01)]
            assert table[row, column].tolist() == pytest.approx(expected, abs=1e-7)


def test_rope_keeps_norms_and_depends_on_relative_positions_only():
    q, k = torch.randn(2, 16, generator=torch.Generator().manual_seed(0))
    cos, sin = jit.rope_table(6, 16, 2, torch.device("cpu"))
    rotated_q, rotated_k = (ops.apply_rope(v.expand(1, 1, 38, 16), (cos, sin))[0, 0] for v in (q, k))
    torch.testing.assert_close(rotated_q.norm(dim=-1), q.norm().expand(38))
    assert torch.equal(rotated_q[:2], q.expand(2, 16))
    grid_q, grid_k = rotated_q[2:].unflatten(0, (6, 6)), rotated_k[2:].unflatten(0, (6, 6))
    offset = (grid_q[1:, :-2] * grid_k[:-1, 2:]).sum(-1)
    torch.testing.assert_close(offset, offset[0, 0].expand_as(offset))
    assert not torch.allclose(offset[0, 0], (grid_q[1, 1] * grid_k[0, 0]).sum())


def test_initial_weights_have_the_official_distributions():
    net = jit.build("JiT-T/4", 16, 10)
    net.init_weights(7)
    state = net.state_dict()
    for name, value in state.items():
        zero = "adaLN" in name or name.startswith("final_layer.linear") or name.endswith("bias")
        if "norm" in name:
            assert (value == 1).all(), name
        elif zero:
            assert (value == 0).all(), name
        elif name.startswith(("t_embedder", "y_embedder", "in_context")):
            assert value.std().item() == pytest.approx(0.02, rel=0.1), name
        elif name != "pos_embed":
            bound = math.sqrt(6 / (value.shape[0] + value[0].numel()))
            assert 0.99 * bound < value.abs().max() <= bound, name
            assert value.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05), name
    torch.testing.assert_close(state["pos_embed"], jit.sincos_position_embedding(4, 128))
    assert not torch.equal(state["blocks.0.attn.qkv.weight"], state["blocks.1.attn.qkv.weight"])
    assert (net(*batch(net)) == 0).all()


def test_initial_weights_depend_on_the_seed_alone():
    torch.manual_seed(1)
    one = jit.build("JiT-T/4", 16, 10)
    one.init_weights(7)
    torch.manual_seed(2)
    with torch.device("meta"):
        two = jit.build("JiT-T/4", 16, 10)
    with pytest.raises(ValueError, match="to_empty"):
        two.init_weights(7)
    two.to_empty(device="cpu").init_weights(7)
    assert all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), two.state_dict().values(), strict=True))
    two.init_weights(8)
    assert not torch.equal(one.x_embedder.proj1.weight, two.x_embedder.proj1.weight)


@pytest.mark.parametrize("assign", [False, True])
def test_meta_network_loads_and_computes(assign):
    source = with_formula_weights(JiT(16, 4, **SMALL, in_context_len=3, in_context_start=1))
    with torch.device("meta"):
        loaded = JiT(16, 4, **SMALL, in_context_len=3, in_context_start=1)
    if not assign:
        loaded.to_empty(device="cpu")
    loaded.load_state_dict(source.state_dict(), assign=assign)
    assert torch.equal(loaded.eval()(*batch(source)), source(*batch(source)))


@pytest.mark.parametrize(("drop", "gradient_checkpointing"), [(0.0, False), (0.3, True)])
def test_compiles_to_one_graph(drop, gradient_checkpointing):
    arguments = SMALL | {"in_context_len": 3, "in_context_start": 2, "attn_drop": drop, "proj_drop": drop}
    net = with_formula_weights(JiT(8, 4, **arguments, gradient_checkpointing=gradient_checkpointing)).train()
    inputs, keys = batch(net), SampleKeys(3, torch.tensor([5, 6]))
    torch._dynamo.reset()
    compiled = torch.compile(net, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(*inputs, keys), net(*inputs, keys))


def test_slots_of_a_batch_do_not_mix():
    net = with_formula_weights(JiT(16, 4, **SMALL, in_context_len=3, in_context_start=1))
    x, t, y = batch(net, 4)
    output = net(x, t, y)
    changed = net(x.where(torch.arange(4).view(4, 1, 1, 1) == 2, -x), t.index_fill(0, torch.tensor([0]), 0.9), y)
    assert torch.equal(changed[2], output[2])
    assert not torch.allclose(changed[3], output[3], atol=1e-3)
    order = torch.tensor([2, 0, 3, 1])
    torch.testing.assert_close(net(x[order], t[order], y[order]), output[order], atol=1e-5, rtol=1e-5)


def test_autocast_is_near_and_keeps_bfloat16_throughout():
    net = with_formula_weights(JiT(16, 4, **SMALL, in_context_len=3, in_context_start=1))
    types = []
    for block in net.blocks:
        block.register_forward_hook(lambda _, __, output: types.append(output.add_branch().dtype))
    with torch.autocast("cpu", torch.bfloat16):
        half = net(*batch(net))
    assert types == [torch.bfloat16] * 4
    torch.testing.assert_close(half.float(), net(*batch(net)), atol=0.1, rtol=0.05)


class TestDropout:
    """Masks are functions of (seed, sample number, layer), and the expectation is the undropped value."""

    def net(self, attn: float, proj: float) -> JiT:
        arguments = SMALL | {"depth": 8, "attn_drop": attn, "proj_drop": proj}
        return with_formula_weights(JiT(16, 4, **arguments, in_context_len=3, in_context_start=4)).train()

    def test_sits_in_the_middle_half(self):
        net = self.net(0.1, 0.2)
        assert [(b.attn.attn_drop, b.attn.proj_drop, b.mlp.drop) for b in net.blocks] == (
            [(0, 0, 0)] * 2 + [(0.1, 0.2, 0.2)] * 4 + [(0, 0, 0)] * 2
        )
        sites = [site for b in net.blocks for site in (b.attn.site, b.attn.site + 1, b.mlp.site)]
        assert sites == list(range(24))

    @pytest.mark.parametrize(("attn", "proj"), [(0.3, 0.0), (0.0, 0.3)])
    def test_follows_the_sample_not_the_slot(self, attn, proj):
        net = self.net(attn, proj)
        x, t, y = (value[:1].expand(3, *value.shape[1:]) for value in batch(net))
        a, b, c = net(x, t, y, SampleKeys(3, torch.tensor([11, 12, 11])))
        torch.testing.assert_close(a, c, atol=1e-5, rtol=1e-5)
        assert not torch.allclose(a, b, atol=1e-3)
        moved = net(x, t, y, SampleKeys(3, torch.tensor([12, 11, 40])))[1]
        torch.testing.assert_close(moved, a, atol=1e-5, rtol=1e-5)
        assert not torch.allclose(net(x, t, y, SampleKeys(4, torch.tensor([11, 0, 0])))[0], a, atol=1e-3)

    def test_is_off_outside_training(self):
        net, plain = self.net(0.3, 0.3).eval(), self.net(0.0, 0.0).eval()
        keys = SampleKeys(3, torch.tensor([1, 2]))
        assert torch.equal(net(*batch(net), keys), plain(*batch(net)))

    def test_needs_keys_in_training(self):
        net = self.net(0.3, 0.0)
        with pytest.raises(ValueError, match="keys"):
            net(*batch(net))

    def test_keeps_the_expectation(self):
        ones = torch.ones(50, 1000)
        dropped = dropout(ones, 0.2, SampleKeys(0, torch.arange(50)), 4)
        assert set(dropped.unique().tolist()) == {0.0, 1.25}
        assert dropped.mean().item() == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize("bf16", [False, True])
def test_gradient_checkpointing_gives_equal_gradients(bf16):
    # With dropout in attention and MLP, and context tokens entering on the way.
    arguments = SMALL | {"in_context_len": 3, "in_context_start": 2, "attn_drop": 0.3, "proj_drop": 0.2}
    gradients = []
    for gradient_checkpointing in (False, True):
        net = with_formula_weights(JiT(8, 4, **arguments, gradient_checkpointing=gradient_checkpointing)).train()
        x, t, y = batch(net, 3)
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = net(x, t, y, SampleKeys(0, torch.arange(3))).float().square().sum()
        loss.backward()
        gradients.append({name: p.grad for name, p in net.named_parameters() if p.requires_grad})
    for name, gradient in gradients[0].items():
        assert gradient is not None and gradient.any() and torch.equal(gradient, gradients[1][name]), name


def test_explicit_attention_equals_the_fused_one():
    plain = with_formula_weights(JiT(16, 4, **SMALL, in_context_len=3, in_context_start=1)).train()
    explicit = with_formula_weights(JiT(16, 4, **SMALL, in_context_len=3, in_context_start=1, attn_drop=1e-9)).train()
    keys = SampleKeys(3, torch.tensor([1, 2]))
    torch.testing.assert_close(explicit(*batch(plain), keys), plain(*batch(plain)), atol=1e-5, rtol=1e-5)


def test_build_by_name():
    net = jit.build("JiT-T/8", 32, 10, attn_drop=0.1)
    variant = JIT_CONFIGS["T"]
    assert net.pos_embed.shape == (1, 16, variant.hidden_size)
    assert net.x_embedder.proj1.weight.shape == (variant.bottleneck_dim, 3, 8, 8)
    assert net.in_context_posemb.shape == (1, 4, variant.hidden_size)
    assert (len(net.blocks), net.in_context_start, net.head_dim, net.has_dropout) == (6, 2, 32, True)
    with pytest.raises(UserError, match="30 pixels cannot be divided into patches of 8"):
        jit.build("JiT-T/8", 30, 10)


def test_impossible_sizes_are_refused():
    with pytest.raises(ValueError, match="divisible by 4"):
        JiT(16, 4, hidden_size=60, num_heads=6, depth=2, in_context_start=1)
    with pytest.raises(ValueError, match="block 4 of 4"):
        JiT(16, 4, **SMALL, in_context_len=1, in_context_start=4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
class TestOnTheGpu:
    """The same weights and, to rounding, the same numbers as on the CPU, eager and compiled."""

    def test_initial_weights_are_those_of_the_cpu(self):
        with torch.device("cuda"):
            there = jit.build("JiT-T/4", 16, 10)
        here = jit.build("JiT-T/4", 16, 10)
        for net in (here, there):
            net.init_weights(7)
        for name, value in here.state_dict().items():
            assert torch.equal(value, there.state_dict()[name].cpu()), name

    def test_official_output_eager_and_compiled(self, official):
        _, golden, facts = official
        there = with_formula_weights(JiT(**facts["arguments"])).cuda()
        inputs = [golden[name].cuda() for name in "xty"]
        torch._dynamo.reset()
        for run in (there, torch.compile(there, fullgraph=True)):
            torch.testing.assert_close(run(*inputs).cpu(), golden["output"], atol=1e-4, rtol=1e-4)
