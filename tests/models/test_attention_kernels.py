"""The CPU kernel against plain operations, in every way somebody may differentiate, record or mask it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from diffattn.models.attention import ATTENTION, Attention, DifferentialAttention, kernels
from diffattn.models.attention.plain import plain_attention
from diffattn.models.capture import record
from diffattn.models.zoo import create_model

BATCH, TOKENS, WIDTH, HEADS = 4, 5, 8, 2
VARIANTS = {
    "softmax": ("softmax", {}),
    "V1": ("differential", {"lambda_init": 0.8}),
    "V2": ("differential_v2", {}),
    "V2 grouped": ("differential_v2", {"num_kv_heads": 1}),
}
REGIMES = {
    "kept, one chunk": (2**25, 2**21),
    "kept, by sample": (2**25, 1),
    "made again": (0, 2**21),
    "both": (0, 1),
}
"""(KEEP_BYTES, CHUNK_BYTES)."""


def make(variant: str, dtype: torch.dtype = torch.float64, **options: object) -> Attention:
    torch.manual_seed(0)
    name, own = VARIANTS[variant]
    layer = ATTENTION[name](WIDTH, HEADS, **{"qkv_bias": True, "proj_bias": True} | own | options)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.6)
    return layer.to(dtype).eval()


def tokens(dtype: torch.dtype = torch.float64, seed: int = 1) -> Tensor:
    return torch.randn(BATCH, TOKENS, WIDTH, generator=torch.Generator().manual_seed(seed)).to(dtype)


def masks() -> dict[str, Tensor | None]:
    causal = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
    blind = causal.clone()
    blind[2] = False
    by_head = torch.rand(BATCH, HEADS, TOKENS, TOKENS, generator=torch.Generator().manual_seed(2)) > 0.4
    additive = torch.randn(BATCH, 1, TOKENS, TOKENS, dtype=torch.float64).masked_fill(~blind, -torch.inf)
    return {"none": None, "causal": causal, "blind row": blind, "by sample and head": by_head, "additive": additive}


@pytest.fixture(params=REGIMES)
def regime(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    keep, chunk = REGIMES[request.param]
    monkeypatch.setattr(kernels, "KEEP_BYTES", keep)
    monkeypatch.setattr(kernels, "CHUNK_BYTES", chunk)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry a call of the kernel."""
    seen: list[int] = []
    attend = kernels.attend
    monkeypatch.setattr(kernels, "attend", lambda *args: (seen.append(1), attend(*args))[1])
    return seen


def both_ways(layer: Attention, x: Tensor, mask: Tensor | None) -> tuple[list[Tensor], list[Tensor]]:
    """Output and gradients in the projection and the weight: by the kernel, by plain operations."""
    packed = layer.pack(x)
    leaves = [packed.projection.detach().requires_grad_()]
    if packed.weight is not None:
        leaves.append(packed.weight.detach().requires_grad_())
    results = []
    for function in (kernels.attend, plain_attention):
        out = function(leaves[0], leaves[1] if len(leaves) > 1 else None, mask, packed.layout)
        upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).to(out.dtype)
        results.append([out.detach(), *torch.autograd.grad(out, leaves, upstream)])
    return results[0], results[1]


@pytest.mark.usefixtures("regime")
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("mask", masks())
def test_output_and_gradients_equal_plain_operations(variant: str, mask: str) -> None:
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 2e-6)):
        attn_mask = masks()[mask]
        by_kernel, by_hand = both_ways(make(variant, dtype), tokens(dtype), attn_mask)
        for ours, theirs in zip(by_kernel, by_hand, strict=True):
            assert (ours - theirs).abs().max() <= tolerance * max(1.0, theirs.abs().max().item())


@pytest.mark.parametrize("variant", VARIANTS)
def test_fast_layer_is_the_output_of_its_branches(variant: str, calls: list[int]) -> None:
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-6)):
        layer, x = make(variant, dtype), tokens(dtype)
        for mask in masks().values():
            expected = layer.output(layer.branches(x, mask).context)
            assert (layer(x, attn_mask=mask) - expected).abs().max() <= tolerance * expected.abs().max()
    assert len(calls) == 2 * len(masks())


@pytest.mark.parametrize("variant", VARIANTS)
def test_rows_that_see_nothing_have_no_context(variant: str) -> None:
    layer, x, mask = make(variant), tokens(), masks()["blind row"]
    packed = layer.pack(x)
    merged = kernels.attend(packed.projection, packed.weight, mask, packed.layout)
    assert (merged[:, 2] == 0).all()
    assert (merged[:, [0, 1, 3, 4]] != 0).all()


def test_lowest_float32_in_a_mask_hides_in_bfloat16_without_becoming_infinite() -> None:
    layer, x = make("V1", torch.bfloat16), tokens(torch.bfloat16)
    mask = torch.zeros(TOKENS, TOKENS).masked_fill(~masks()["causal"], torch.finfo(torch.float32).min)
    mask[2] = torch.finfo(torch.float32).min
    branches = layer.branches(x, mask)
    assert branches.mask is not None
    assert not branches.mask.any()
    torch.testing.assert_close(branches.maps[0][:, :, 2], torch.full((BATCH, HEADS, TOKENS), 0.2).bfloat16())
    torch.testing.assert_close(layer(x, attn_mask=mask), layer.output(branches.context), rtol=0.05, atol=0.05)


def test_a_mask_changed_before_the_backward_pass_is_an_error() -> None:
    mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
    out = make("V1")(tokens().requires_grad_(), attn_mask=mask)
    mask.fill_(True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.usefixtures("regime")
@pytest.mark.parametrize("variant", VARIANTS)
def test_first_and_second_derivatives_in_tokens_and_parameters(variant: str) -> None:
    layer, mask = make(variant), masks()["blind row"]
    names = [name for name, _ in layer.named_parameters()]
    leaves = (tokens()[:2].requires_grad_(), *layer.parameters())

    def run(x: Tensor, *parameters: Tensor) -> Tensor:
        values = dict(zip(names, parameters, strict=True))
        return torch.func.functional_call(layer, values, (x,), {"attn_mask": mask})

    assert torch.autograd.gradcheck(run, leaves, check_forward_ad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(run, leaves, fast_mode=True)


def hessian_products(layer: Attention) -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    """The Hessian of sum(layer(x)^3) times a direction, by the ways people take it."""

    def loss(x: Tensor) -> Tensor:
        return layer(x).pow(3).sum()

    def twice(x: Tensor, direction: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(loss(x), x, create_graph=True)
        return torch.autograd.grad(gradient, x, direction)[0]

    def forward_over_reverse(x: Tensor, direction: Tensor) -> Tensor:
        return torch.func.jvp(torch.func.grad(loss), (x,), (direction,))[1]

    def dual_numbers(x: Tensor, direction: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, direction)
            (gradient,) = torch.autograd.grad(loss(dual), dual)
            tangent = forward_ad.unpack_dual(gradient).tangent
            assert tangent is not None
            return tangent

    return {"twice": twice, "forward over reverse": forward_over_reverse, "dual numbers": dual_numbers}


@pytest.mark.parametrize("way", ["twice", "forward over reverse", "dual numbers"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_hessian_vector_products(variant: str, way: str) -> None:
    layer, x, direction = make(variant), tokens(), tokens(seed=5)

    def gradient(points: Tensor) -> Tensor:
        points = points.detach().requires_grad_()
        return torch.autograd.grad(layer(points).pow(3).sum(), points)[0]

    step = 1e-5
    expected = (gradient(x + step * direction) - gradient(x - step * direction)) / (2 * step)
    found = hessian_products(layer)[way](x, direction)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6 * expected.abs().max().item())


@pytest.mark.parametrize("variant", VARIANTS)
def test_products_with_the_jacobian(variant: str) -> None:
    """The jvp under no_grad by duals and functorch, by a twice-taken vjp, and a tangent in the cotangent."""
    layer, x, direction, upstream = make(variant), tokens(), tokens(seed=5), tokens(seed=6)
    step = 1e-6
    with torch.no_grad():
        expected = (layer(x + step * direction) - layer(x - step * direction)) / (2 * step)
        functional = torch.func.jvp(layer, (x,), (direction,))[1]
        with forward_ad.dual_level():
            dual = forward_ad.unpack_dual(layer(forward_ad.make_dual(x, direction))).tangent
    _, twice = torch.autograd.functional.jvp(layer, x, direction)
    for found in (functional, dual, twice):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)
    leaf = x.clone().requires_grad_()
    out = layer(leaf)
    (plain,) = torch.autograd.grad(out, leaf, direction, retain_graph=True)
    with forward_ad.dual_level():
        (pulled,) = torch.autograd.grad(out, leaf, forward_ad.make_dual(upstream, direction))
        torch.testing.assert_close(forward_ad.unpack_dual(pulled).tangent, plain, rtol=0, atol=1e-12)


@pytest.mark.parametrize("variant", VARIANTS)
def test_batched_gradients(variant: str) -> None:
    layer, x = make(variant), tokens()[:1, :3]
    rowwise = torch.autograd.functional.jacobian(layer, x)
    torch.testing.assert_close(torch.autograd.functional.jacobian(layer, x, vectorize=True), rowwise)
    torch.testing.assert_close(torch.func.jacrev(layer)(x), rowwise)
    each = torch.func.vmap(torch.func.grad(lambda one: layer(one[None]).square().sum()))(tokens())
    points = tokens().requires_grad_()
    torch.testing.assert_close(each, torch.autograd.grad(layer(points).square().sum(), points)[0])


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradient_norm_penalty_trains(variant: str) -> None:
    layer, x = make(variant), tokens()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.01)

    def penalty() -> Tensor:
        points = x.clone().requires_grad_()
        return torch.autograd.grad(layer(points).square().mean(), points, create_graph=True)[0].square().sum()

    before = penalty().item()
    for _ in range(20):
        optimizer.zero_grad()
        penalty().backward()
        optimizer.step()
    assert penalty().item() < 0.7 * before


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("grad", [True, False])
def test_listeners_change_no_bit_and_hear_differentiable_branches(variant: str, grad: bool) -> None:
    layer, x = make(variant, torch.float32), tokens(torch.float32).requires_grad_(grad)
    heard: list = []
    with torch.set_grad_enabled(grad):
        quiet = layer(x)
        with layer.listen(heard.append):
            assert torch.equal(layer(x), quiet)
        branches = layer.branches(x)
    assert torch.equal(heard[0].combined, branches.combined)
    if grad:
        found = torch.autograd.grad(sum(one.square().sum() for one in heard[0].maps), x)
        expected = torch.autograd.grad(sum(one.square().sum() for one in branches.maps), x)
        torch.testing.assert_close(found, expected)
        with torch.no_grad():
            assert torch.equal(layer(x), quiet)


@pytest.mark.parametrize("name", ["vit_micro_patch2_8", "diffvit_micro_patch2_8"])
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_recording_a_model_changes_no_logit(
    name: str, mode: Callable[[], contextlib.AbstractContextManager]
) -> None:
    model = create_model(name, in_chans=1, num_classes=10).eval()
    images = torch.rand(3, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    with mode():
        logits = model(images)
        with record(model) as tape:
            assert torch.equal(model(images), logits)
    assert len(tape.branches) == model.config.depth


@pytest.mark.parametrize("variant", VARIANTS)
def test_bfloat16_and_autocast(variant: str, calls: list[int]) -> None:
    layer, x = make(variant, torch.float32), tokens(torch.float32).requires_grad_()
    exact = layer(x)
    (gradient,) = torch.autograd.grad(exact.square().sum(), x)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = layer(x)
        assert rounded.dtype == torch.bfloat16
        (inside,) = torch.autograd.grad(rounded.float().square().sum(), x, retain_graph=True)
    (outside,) = torch.autograd.grad(rounded.float().square().sum(), x)
    half = layer.to(torch.bfloat16)(x.detach().bfloat16())
    assert len(calls) == 3
    for found, expected in ((rounded, exact), (half, exact), (inside, gradient), (outside, gradient)):
        assert (found.float() - expected).norm() <= 0.05 * expected.norm()


@pytest.mark.parametrize("frozen", [True, False])
def test_frozen_weight_costs_nothing(frozen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = make("V1").requires_grad_(not frozen), tokens().requires_grad_()
    found: list = []
    gradients = kernels._gradients
    monkeypatch.setattr(kernels, "_gradients", lambda *args: (found.append(gradients(*args)), found[-1])[1])
    layer(x).sum().backward()
    assert (found[0][1] is None) is frozen
    assert (layer.lambda_q1.grad is None) is frozen


@pytest.mark.parametrize("variant", VARIANTS)
def test_large_maps_are_not_saved(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = make(variant), torch.randn(2, 40, WIDTH, dtype=torch.float64)
    size = 2 * layer.pack(x).layout.maps * 40**2
    for limit, saves in ((8 * size, True), (8 * size - 1, False)):
        monkeypatch.setattr(kernels, "KEEP_BYTES", limit)
        saved: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda one, saved=saved: (saved.append(one.numel()), one)[1], id
        ):
            layer(x)
        assert (max(saved) == size) is saves


def test_plain_operations_where_the_kernel_is_not_right(calls: list[int]) -> None:
    class Doubled(DifferentialAttention):
        def branches(self, x: Tensor, attn_mask: Tensor | None = None):
            two = super().branches(x, attn_mask)
            return type(two)(two.maps, tuple(2 * one for one in two.weights), two.kinds, two.values, two.mask)

    torch.manual_seed(0)
    x, doubled = tokens(), Doubled(WIDTH, HEADS).double()
    torch.testing.assert_close(doubled(x), doubled.output(doubled.branches(x).context), rtol=0, atol=1e-12)
    dropping = make("V1", attn_dropout=0.5).train()
    assert not torch.equal(dropping(x), dropping(x))
    learned = torch.zeros(TOKENS, TOKENS, dtype=torch.float64, requires_grad=True)
    make("V1")(x, attn_mask=learned).square().sum().backward()
    assert learned.grad is not None
    assert learned.grad.abs().max() > 0
    assert not calls
    make("V1")(x)
    assert len(calls) == 1


def test_a_variant_without_maps_says_what_it_lacks() -> None:
    class Empty(Attention):
        def output(self, context: Tensor) -> Tensor:
            return context

        def score_operators(self):
            raise NotImplementedError

    with pytest.raises(NotImplementedError, match=r"Empty must define pack\(\) and finish\(\), or branches\(\)"):
        Empty(WIDTH, HEADS)(tokens())
