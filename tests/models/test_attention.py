"""Contract tests that every registered attention layer gets by being registered, and each variant's definition."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from diffattn.models.attention import (
    ATTENTION,
    Attention,
    DifferentialAttention,
    DifferentialAttentionV2,
    SoftmaxAttention,
    depth_lambda_init,
)

WIDTH, HEADS, TOKENS, BATCH = 16, 2, 5, 3
VARIANTS = sorted(ATTENTION)


def make(name: str, *, dtype: torch.dtype = torch.float64, seed: int = 0, **options: object) -> Attention:
    torch.manual_seed(seed)
    layer = ATTENTION[name](WIDTH, HEADS, **{"qkv_bias": True, "proj_bias": True} | options)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return layer.to(dtype).eval()


def tokens(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(BATCH, TOKENS, WIDTH, dtype=dtype, generator=torch.Generator().manual_seed(1))


def masks() -> dict[str, Tensor | None]:
    causal = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
    padding = torch.ones(BATCH, 1, TOKENS, TOKENS, dtype=torch.bool)
    padding[1, :, :, 3:] = False
    blind_row = causal.clone()
    blind_row[2] = False
    per_head = torch.rand(BATCH, HEADS, TOKENS, TOKENS, generator=torch.Generator().manual_seed(2)) > 0.3
    per_head[..., 0] = True
    additive = torch.randn(TOKENS, TOKENS, dtype=torch.float64).masked_fill(~causal, -torch.inf)
    return {
        "none": None,
        "causal": causal,
        "padding": padding,
        "blind row": blind_row,
        "per head": per_head,
        "additive": additive,
    }


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("mask", masks())
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_fast_paths_agree_with_the_branches(name: str, mask: str, dtype: torch.dtype, tolerance: float) -> None:
    layer, x, attn_mask = make(name, dtype=dtype), tokens(dtype), masks()[mask]
    if attn_mask is not None and attn_mask.is_floating_point():
        attn_mask = attn_mask.to(dtype)
    reference = layer.output(layer.branches(x, attn_mask).context)
    scale = reference.abs().max().item()
    with torch.no_grad():
        fused = layer(x, attn_mask=attn_mask)
    assert (layer(x, attn_mask=attn_mask) - reference).abs().max().item() <= tolerance * max(1, scale)
    assert (fused - reference).abs().max().item() <= tolerance * max(1, scale)


@pytest.mark.parametrize("name", VARIANTS)
def test_context_is_the_signed_sum_of_maps_times_values(name: str) -> None:
    branches = make(name).branches(tokens())
    by_hand = sum(w * a @ v for w, a, v in zip(branches.weights, branches.maps, branches.values, strict=True))
    torch.testing.assert_close(branches.context, by_hand, rtol=0, atol=1e-12)
    torch.testing.assert_close(branches.combined, sum(branches.weighted), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("mask", masks())
def test_softmax_maps_are_distributions_over_what_is_visible(name: str, mask: str) -> None:
    attn_mask = masks()[mask]
    branches = make(name).branches(tokens(), attn_mask)
    for kind, attention_map in zip(branches.kinds, branches.maps, strict=True):
        if kind != "softmax":
            continue
        sums = attention_map.sum(-1)
        if branches.mask is None:
            torch.testing.assert_close(sums, torch.ones_like(sums))
            continue
        hidden = branches.mask.broadcast_to(attention_map.shape)
        assert (attention_map[hidden] == 0).all()
        torch.testing.assert_close(sums, (~hidden).any(-1).to(sums.dtype))
    assert torch.isfinite(branches.combined).all()


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("mask", ["none", "blind row"])
def test_derivatives_of_first_and_second_order(name: str, mask: str) -> None:
    layer, x = make(name), tokens()[:1, :, :].requires_grad_()
    attn_mask = masks()[mask]

    def run(points: Tensor) -> Tensor:
        return layer(points, attn_mask=attn_mask)

    assert torch.autograd.gradcheck(run, (x,), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(run, (x,))


@pytest.mark.parametrize("name", VARIANTS)
def test_forward_mode_works_under_no_grad(name: str) -> None:
    layer, x = make(name), tokens()
    direction = torch.randn_like(x)
    step = 1e-6
    expected = (layer(x + step * direction) - layer(x - step * direction)) / (2 * step)
    with torch.no_grad():
        _, by_functional = torch.func.jvp(layer, (x,), (direction,))
        with forward_ad.dual_level():
            dual = layer(forward_ad.make_dual(x, direction))
            by_dual = forward_ad.unpack_dual(dual).tangent
    assert by_dual is not None
    torch.testing.assert_close(by_functional, expected, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(by_dual, by_functional)


@pytest.mark.parametrize("name", VARIANTS)
def test_dropout_acts_in_training_only_and_on_the_maps(name: str) -> None:
    layer, x = make(name, attn_dropout=0.5), tokens()
    plain = make(name)
    assert torch.equal(layer(x), plain(x))
    with torch.no_grad():
        assert torch.equal(layer(x), layer(x))
    layer.train()
    torch.manual_seed(0)
    first = layer(x)
    assert not torch.equal(first, layer(x))
    with torch.no_grad():
        torch.manual_seed(0)
        torch.testing.assert_close(layer(x), first)


@pytest.mark.parametrize("name", VARIANTS)
def test_score_operators_rebuild_the_maps(name: str) -> None:
    layer, x = make(name), tokens()
    operators, branches = layer.score_operators(), layer.branches(x)
    for index, (head, branch) in enumerate(zip(operators.map_head, operators.map_branch, strict=True)):
        query = x @ operators.query[index].T + operators.query_bias[index]
        key = x @ operators.key[index].T + operators.key_bias[index]
        scores = operators.scale * query @ key.transpose(-2, -1)
        torch.testing.assert_close(scores.softmax(-1), branches.maps[branch][:, head])
    value = torch.einsum("bnc,hvc->bhnv", x, operators.value) + operators.value_bias[:, None]
    torch.testing.assert_close(value, branches.values[0])
    if not isinstance(layer, DifferentialAttention):  # its sub-norm lies between the context and O
        out = torch.einsum("bhnv,chv->bnc", branches.context, operators.output) + operators.output_bias
        torch.testing.assert_close(out, layer(x))


@pytest.mark.parametrize("name", VARIANTS)
def test_listening_hands_over_the_branches_and_changes_nothing(name: str) -> None:
    layer, x = make(name, dtype=torch.float32), tokens(torch.float32)
    heard: list = []
    with torch.no_grad():
        quiet_fused = layer(x)
        with layer.listen(heard.append):
            assert torch.equal(layer(x), quiet_fused)
    quiet = layer(x)
    with layer.listen(heard.append):
        assert torch.equal(layer(x), quiet)
    layer(x)
    assert len(heard) == 2
    torch.testing.assert_close(heard[0].combined, heard[1].combined)
    assert heard[1].combined.requires_grad


@pytest.mark.parametrize("name", VARIANTS)
def test_works_in_bfloat16_under_autocast(name: str) -> None:
    layer, x = make(name, dtype=torch.float32), tokens(torch.float32).requires_grad_()
    exact = layer(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = layer(x)
    rounded.float().sum().backward()
    assert torch.isfinite(x.grad).all()
    assert (rounded.float() - exact).abs().max() < 0.1 * exact.abs().max()


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize(
    ("shape", "mask", "message"),
    [
        ((2, 5, 15), None, r"x must be \[batch, tokens, 16\]; got shape \(2, 5, 15\)"),
        ((5, 16), None, r"x must be \[batch, tokens, 16\]; got shape \(5, 16\)"),
        ((2, 5, 16), torch.ones(4, 5, dtype=torch.bool), r"attn_mask must be \[5, 5\] or .*; got shape \(4, 5\)"),
        ((2, 5, 16), torch.ones(2, 5, 5, dtype=torch.bool), r"attn_mask must be .* got shape \(2, 5, 5\)"),
        ((2, 5, 16), torch.ones(5, 5, dtype=torch.int64), r"attn_mask must be bool .*; got torch.int64"),
    ],
)
def test_bad_tokens_and_masks_are_refused(name: str, shape: tuple, mask: Tensor | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(name)(torch.zeros(shape, dtype=torch.float64), attn_mask=mask)


@pytest.mark.parametrize("name", VARIANTS)
def test_bad_options_are_refused(name: str) -> None:
    for options, message in (
        ({"num_heads": 0}, "num_heads must be an integer of at least 1; got 0"),
        ({"num_heads": True}, "num_heads must be an integer of at least 1; got True"),
        ({"attn_dropout": 1.0}, r"attn_dropout must be in \[0, 1\); got 1.0"),
        ({"proj_dropout": -0.1}, r"proj_dropout must be in \[0, 1\); got -0.1"),
    ):
        with pytest.raises(ValueError, match=message):
            ATTENTION[name](**{"embed_dim": 16, "num_heads": 2} | options)


def test_differential_pairs_adjacent_maps() -> None:
    """With one odd head out, the second map of head 0 changes and no other: maps (0,1) and (2,3) are pairs."""
    layer = make("differential")
    with torch.no_grad():
        query = layer.qkv.weight[:WIDTH].view(2 * HEADS, layer.head_dim, WIDTH)
        before = layer.branches(tokens())
        query[1].zero_()
        layer.qkv.bias[layer.head_dim : 2 * layer.head_dim].zero_()
        after = layer.branches(tokens())
    torch.testing.assert_close(after.maps[1][:, 0], torch.full_like(after.maps[1][:, 0], 1 / TOKENS))
    assert torch.equal(before.maps[0], after.maps[0])
    assert torch.equal(before.maps[1][:, 1], after.maps[1][:, 1])


def test_differential_by_hand() -> None:
    """The V1 layer against its definition, written out head by head."""
    layer, x = make("differential", lambda_init=0.8), tokens()
    d = WIDTH // (2 * HEADS)
    query, key, value = (x @ layer.qkv.weight.T + layer.qkv.bias).split(WIDTH, dim=-1)
    lam = torch.exp(layer.lambda_q1 @ layer.lambda_k1) - torch.exp(layer.lambda_q2 @ layer.lambda_k2) + 0.8
    heads = []
    for i in range(HEADS):
        maps = []
        for j in (2 * i, 2 * i + 1):
            cut = slice(j * d, (j + 1) * d)
            maps.append((query[..., cut] @ key[..., cut].transpose(-2, -1) / math.sqrt(d)).softmax(-1))
        context = (maps[0] - lam * maps[1]) @ value[..., 2 * i * d : 2 * (i + 1) * d]
        rms = (context.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        heads.append((1 - 0.8) * context / rms * layer.sub_norm.weight)
    expected = torch.cat(heads, -1) @ layer.proj.weight.T + layer.proj.bias
    torch.testing.assert_close(layer(x), expected, rtol=0, atol=1e-12)


def test_differential_v2_by_hand() -> None:
    """The V2 layer with grouped keys against its definition: query heads (2i, 2i+1) share one key and value."""
    layer, x = make("differential_v2", num_kv_heads=1, head_dim=4), tokens()
    query, key, value = (x @ layer.qkv.weight.T + layer.qkv.bias).split((16, 4, 4), dim=-1)
    lam = torch.sigmoid(x @ layer.lambda_proj.weight.T)
    heads = []
    for i in range(HEADS):
        first, second = (
            (query[..., 4 * j : 4 * j + 4] @ key.transpose(-2, -1) / 2).softmax(-1) for j in (2 * i, 2 * i + 1)
        )
        heads.append((first - lam[..., i : i + 1] * second) @ value)
    expected = torch.cat(heads, -1) @ layer.proj.weight.T + layer.proj.bias
    torch.testing.assert_close(layer(x), expected, rtol=0, atol=1e-12)


def test_lambda_schedule_counts_depth_from_zero() -> None:
    assert [round(depth_lambda_init(layer), 3) for layer in range(3)] == [0.2, 0.356, 0.471]
    assert DifferentialAttention(16, 2, layer_index=2).lambda_init == depth_lambda_init(2)


@pytest.mark.parametrize("lam", [-0.5, 0.0, 1.5])
def test_lambda_is_unrestricted(lam: float) -> None:
    layer = make("differential", lambda_init=lam)
    with torch.no_grad():
        layer.lambda_q1.zero_()
        layer.lambda_q2.zero_()
    branches = layer.branches(tokens())
    assert branches.weights[1].item() == pytest.approx(-lam, abs=1e-15)
    torch.testing.assert_close(branches.combined.sum(-1), torch.full((BATCH, HEADS, TOKENS), 1 - lam).double())


@pytest.mark.parametrize("bad", ["shallow", math.nan, math.inf, None, True])
def test_lambda_init_is_a_number_or_depth(bad: object) -> None:
    with pytest.raises(ValueError, match="lambda_init must be a finite number or 'depth'; got"):
        DifferentialAttention(16, 2, lambda_init=bad)


def test_impossible_head_counts_state_the_rule() -> None:
    with pytest.raises(ValueError, match=r"embed_dim % \(2 \* num_heads\) == 0; got embed_dim=192, num_heads=5"):
        DifferentialAttention(192, 5)
    with pytest.raises(ValueError, match=r"embed_dim % num_heads == 0; got embed_dim=192, num_heads=5"):
        SoftmaxAttention(192, 5)
    with pytest.raises(ValueError, match="num_kv_heads must divide num_heads; got 4 and 6"):
        DifferentialAttentionV2(192, 6, num_kv_heads=4)


def test_differential_layer_has_the_softmax_layers_parameters_plus_lambda_and_norm() -> None:
    """Width 192, 6 softmax heads against 3 differential ones: 4 vectors of 32 and a norm of 64 more."""
    count = {
        layer: sum(parameter.numel() for parameter in layer.parameters())
        for layer in (SoftmaxAttention(192, 6), DifferentialAttention(192, 3, proj_bias=True))
    }
    softmax, differential = count.values()
    assert differential - softmax == 4 * 32 + 64


def test_lambda_stays_exact_when_the_layer_is_half_precision() -> None:
    layer = make("differential").to(torch.bfloat16)
    assert layer.lambda_value().dtype == torch.float32
