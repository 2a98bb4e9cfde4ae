"""Encoders: initialisation, layouts of observations, and how they are chosen."""

from __future__ import annotations

import math
import sys
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from anybatch.config.schema import ModelConfig
from anybatch.errors import ConfigError, EnvError, Interrupted, UserCodeError
from anybatch.models.encoder import DictEncoder, build_encoder, in_numpy, is_recordable
from anybatch.models.images import image_layout, to_nchw
from anybatch.models.impala import ImpalaEncoder
from anybatch.models.layers import fixed_weights
from anybatch.models.mlp import MlpEncoder
from anybatch.models.nature import NatureEncoder, SmallConvEncoder
from anybatch.models.precision import encode

HWC = gym.spaces.Box(0, 255, (64, 64, 3), np.uint8)
VECTOR = gym.spaces.Box(-1, 1, (5,))


class Custom(nn.Module):
    """A user's encoder."""

    def __init__(self, observation_space: gym.Space[Any], size: int, scale: float = 1.0) -> None:
        super().__init__()
        self.layer = nn.Linear(5, size)
        self.out_features = np.int64(size)  # as of a shape that was computed
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.scale


class Forgetful(nn.Module):
    """A user's encoder that does not say how many features it gives."""

    def __init__(self, observation_space: gym.Space[Any]) -> None:
        super().__init__()


class Wrong(nn.Module):
    """A user's encoder whose forward pass, and its NumPy version, do something else."""

    out_features = 3

    def __init__(self, what: Any) -> None:
        super().__init__()
        self.what = what

    def forward(self, x: torch.Tensor) -> Any:
        return self.what(x)

    def in_numpy(self) -> Any:
        return self.what


NOT_A_MODULE = 3


def build(encoder: str, space: gym.Space[Any] = VECTOR, **options: Any) -> nn.Module:
    return build_encoder(ModelConfig(encoder=encoder, options=options), space)


@pytest.mark.parametrize(
    ("options", "layers", "residual"),
    [
        # First convolutions 1, dense 1.4, residual convolutions sqrt(1 / sqrt(3 stacks) / sqrt(2 blocks))
        # = 6^(-1/4) = 0.638943; 3 stacks x (1 + 2 blocks x 2) convolutions, and the dense layer.
        ({}, 16, 0.638943),
        ({"channels": 4, "blocks": 1}, 10, 0.759836),  # 3^(-1/4); 3 x (1 + 1 x 2) + 1
    ],
)
def test_impala_weight_norms_per_output_unit(options: dict[str, int], layers: int, residual: float) -> None:
    encoder = ImpalaEncoder(HWC, **options)
    found = {}
    for name, layer in encoder.named_modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            norms = layer.weight.flatten(1).norm(dim=1)
            torch.testing.assert_close(norms, norms[:1].expand_as(norms))
            assert layer.bias is not None
            assert (layer.bias == 0).all()
            found[name] = float(norms[0].detach())
    assert len(found) == layers
    assert {layer.out_channels for layer in encoder.modules() if isinstance(layer, nn.Conv2d)} == (
        {4} if options else {16, 32}
    )
    for name, norm in found.items():
        expected = 1.4 if name == "dense" else residual if "blocks" in name else 1.0
        assert norm == pytest.approx(expected, abs=1e-5), name


def test_images_may_come_in_any_layout() -> None:
    images = torch.randint(0, 256, (2, 64, 48, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    hwc = ImpalaEncoder(gym.spaces.Box(0, 255, (64, 48, 3), np.uint8))
    chw = ImpalaEncoder(gym.spaces.Box(0, 1, (3, 64, 48), np.float32))
    chw.load_state_dict(hwc.state_dict())
    features = hwc(images)
    assert features.shape == (2, 256)
    assert (features >= 0).all()
    torch.testing.assert_close(chw(images.permute(0, 3, 1, 2).float() / 255), features, rtol=1e-4, atol=1e-5)
    grey = build("auto", gym.spaces.Box(0, 255, (84, 84), np.uint8))
    assert grey(torch.zeros(2, 84, 84, dtype=torch.uint8)).shape == (2, 256)
    assert hwc.stacks[0].conv.weight.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("shape", "dtype", "layout"),
    [
        ((64, 64, 3), "uint8", "HWC"),
        ((3, 64, 64), "uint8", "CHW"),
        ((4, 84, 84), "uint8", "CHW"),
        ((84, 84, 12), "uint8", "HWC"),
        ((12, 84, 84), "float32", "CHW"),
        ((84, 84), "uint8", "HW"),
        ((84, 84), "float32", None),
        ((4, 84, 84, 3), "uint8", "SHWC"),
        ((4, 84, 84, 1), "float32", "SHWC"),
        ((2, 3, 64, 64), "uint8", "SCHW"),
        ((84, 84, 3, 4), "uint8", None),  # the stack has to come first
        ((16, 16, 16, 2), "float32", None),  # a volume
        ((128,), "uint8", None),
    ],
)
def test_image_layout(shape: tuple[int, ...], dtype: str, layout: str | None) -> None:
    assert image_layout(gym.spaces.Box(0, 1, shape, np.dtype(dtype).type)) == layout
    assert image_layout(gym.spaces.Discrete(3)) is None


@pytest.mark.parametrize("shape", [(4, 84, 84, 3), (4, 3, 84, 84)])
def test_stacks_of_frames_become_channels(shape: tuple[int, ...]) -> None:
    space = gym.spaces.Box(0, 255, shape, np.uint8)
    encoder = build_encoder(ModelConfig(), space)
    assert isinstance(encoder, ImpalaEncoder)
    frames = torch.randint(0, 256, (2, *shape), dtype=torch.uint8)
    channels_last = frames if shape[-1] == 3 else frames.movedim(2, -1)
    # channel 3 s + c is channel c of frame s
    side_by_side = torch.cat(channels_last.unbind(1), dim=-1)
    plain = build_encoder(ModelConfig(), gym.spaces.Box(0, 255, (84, 84, 12), np.uint8))
    plain.load_state_dict(encoder.state_dict())
    torch.testing.assert_close(encoder(frames), plain(side_by_side))


@pytest.mark.parametrize("shape", [(84, 84, 3, 4), (2, 4, 84, 84, 3)])
def test_other_bytes_of_many_dimensions_are_not_flattened_silently(shape: tuple[int, ...]) -> None:
    space = gym.spaces.Box(0, 255, shape, np.uint8)
    with pytest.raises(ConfigError, match=r"uint8 observations of shape .* are neither images nor stacks.*encoder mlp"):
        build_encoder(ModelConfig(), space)
    with pytest.raises(ConfigError, match="are neither images nor stacks"):
        build_encoder(ModelConfig(), gym.spaces.Dict(x=space))
    assert isinstance(build_encoder(ModelConfig(encoder="mlp", options={"width": 2}), space), MlpEncoder)


def test_small_and_odd_images() -> None:
    encoder = ImpalaEncoder(gym.spaces.Box(0, 255, (7, 9, 3), np.uint8), width=2, out_features=10)
    assert encoder(torch.zeros(2, 7, 9, 3, dtype=torch.uint8)).shape == (2, 10)
    nature = NatureEncoder(gym.spaces.Box(0, 255, (4, 84, 84), np.uint8))
    assert nature.layers[7].in_features == 7 * 7 * 64  # 84 -> 20 -> 9 -> 7
    assert nature(torch.zeros(2, 4, 84, 84, dtype=torch.uint8)).shape == (2, 512)
    assert NatureEncoder(gym.spaces.Box(0, 255, (36, 36, 1), np.uint8))(torch.zeros(2, 36, 36, 1)).shape == (2, 512)
    with pytest.raises(ConfigError, match="at least 36 x 36"):
        NatureEncoder(gym.spaces.Box(0, 255, (35, 40, 3), np.uint8))


def test_small_conv_by_hand() -> None:
    encoder = SmallConvEncoder(gym.spaces.Box(0, 1, (5, 4)), channels=1, width=1)
    for layer in (encoder.conv, encoder.dense):
        torch.nn.init.ones_(layer.weight)
    # patches of 3 x 3 at rows 0 and 2, column 0: of 0, 1, ... 4 in each row, sums 3 * (0 + 1 + 2) and 3 * (2 + 3 + 4)
    board = torch.arange(5.0).unsqueeze(1).expand(1, 5, 4) / 100
    torch.testing.assert_close(encoder(board), torch.tanh(torch.tensor([[0.36]])))
    # uint8 is divided by 255, and a channel axis may come first or last
    image = SmallConvEncoder(gym.spaces.Box(0, 255, (9, 9, 3), np.uint8), channels=4)
    assert image(torch.zeros(2, 9, 9, 3, dtype=torch.uint8)).shape == (2, 32)
    assert image.dense.in_features == 4 * 4 * 4
    names = SmallConvEncoder(gym.spaces.Box(0, 255, (3, 3, 1), np.uint8), categories=2)
    # 1 is the last of two categories, 9 is none of them
    board = torch.tensor([[0, 1, 9], [0, 0, 0], [1, 1, 1]], dtype=torch.uint8).view(1, 3, 3, 1)
    expected = torch.tensor([[[1.0, 0, 0], [1, 1, 1], [0, 0, 0]], [[0.0, 1, 0], [0, 0, 0], [1, 1, 1]]])
    torch.testing.assert_close(names.images(board), expected.unsqueeze(0))
    with pytest.raises(ConfigError, match="at least 3 x 3 pixels"):
        SmallConvEncoder(gym.spaces.Box(0, 1, (2, 9)))


def test_mlp_observations() -> None:
    encoder = MlpEncoder(VECTOR, width=8, depth=3)
    assert encoder(torch.zeros(2, 5, dtype=torch.float64)).shape == (2, 8)
    weight = encoder.layers[2].weight  # orthogonal with gain sqrt(2): W W^T = 2 I
    torch.testing.assert_close(weight @ weight.T, 2 * torch.eye(8), rtol=1e-4, atol=1e-5)
    hot = MlpEncoder(gym.spaces.Discrete(4, start=2))
    eye = hot.layers(torch.eye(4))
    torch.testing.assert_close(hot(torch.arange(2, 6)), eye)
    many = MlpEncoder(gym.spaces.MultiDiscrete([2, 3]))
    expected = many.layers(torch.tensor([[0.0, 1, 1, 0, 0]]))
    torch.testing.assert_close(many(torch.tensor([[1, 0]])), expected)
    ram = MlpEncoder(gym.spaces.Box(0, 255, (128,), np.uint8))
    torch.testing.assert_close(
        ram(torch.full((1, 128), 51, dtype=torch.uint8)), ram.layers(torch.full((1, 128), 0.2)), rtol=1e-4, atol=1e-5
    )
    assert MlpEncoder(gym.spaces.MultiBinary(3))(torch.ones(2, 3, dtype=torch.int8)).shape == (2, 64)
    stacked = torch.func.vmap(hot)(torch.arange(2, 6).expand(3, 4))
    torch.testing.assert_close(stacked, eye.expand(3, 4, 64))
    with pytest.raises(EnvError, match="supported are Box"):
        MlpEncoder(gym.spaces.Text(3))


def test_auto_chooses_by_observation() -> None:
    assert isinstance(build("auto", HWC), ImpalaEncoder)
    assert isinstance(build("auto", VECTOR), MlpEncoder)
    assert isinstance(build("mlp", HWC), MlpEncoder)
    assert build("nature", HWC, out_features=7)(torch.zeros(1, 64, 64, 3)).shape == (1, 7)


def test_custom_encoder() -> None:
    encoder = build(f"{__name__}:Custom", size=3, scale=2.0)
    assert encoder.out_features == 3 and type(encoder.out_features) is int
    assert encoder.low_precision is False
    assert encoder(torch.zeros(2, 5)).shape == (2, 3)


@pytest.mark.parametrize(
    ("encoder", "options", "message"),
    [
        ("resnet", {}, r"model\.encoder is 'resnet', but must be auto, impala, nature, small-conv, mlp or import"),
        ("impala", {}, r"model\.encoder is impala, which needs images"),
        ("nature", {}, r"model\.encoder is nature, which needs images"),
        ("mlp", {"widht": 3}, r"'widht', which the encoder does not take; it takes depth, gain, width"),
        ("mlp", {"width": 0}, r"model\.options width is 0"),
        ("mlp", {"depth": 1.5}, r"model\.options depth is 1\.5"),
        ("mlp", {"gain": "big"}, r"model\.options gain is 'big', but must be a finite number"),
        ("mlp", {"gain": math.nan}, r"model\.options gain is nan"),
        (".module:Thing", {}, r"model\.encoder is '\.module:Thing', but must be import\.path:Class"),
        ("no.such.module:Thing", {}, r"model\.encoder is 'no\.such\.module:Thing', which cannot be imported"),
        (f"{__name__}:Missing", {}, r"cannot be imported: .*Missing"),
        (f"{__name__}:NOT_A_MODULE", {}, r"not a subclass of torch\.nn\.Module"),
        (f"{__name__}:Custom", {}, r"missing a required argument: 'size'"),
        (
            f"{__name__}:Custom",
            {"size": 3, "tint": 1},
            r"'tint', which the encoder does not take; it takes scale, size",
        ),
        (f"{__name__}:Forgetful", {}, r"model\.encoder .* lacks the integer attribute out_features"),
    ],
)
def test_mistakes_are_named(encoder: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(encoder, VECTOR, **options)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (nn.Linear(4, 3), "RuntimeError: mat1 and mat2 shapes cannot be multiplied"),
        (lambda x: sys.exit(0), "SystemExit: 0"),
    ],
)
def test_exceptions_of_a_user_s_forward_pass_are_named(what: Any, message: str) -> None:
    with pytest.raises(UserCodeError, match=f"^forward of the encoder Wrong raised {message}"):
        encode(Wrong(what), torch.zeros(2, 5), "fp32")
    with pytest.raises(UserCodeError, match=r"^the function from in_numpy of the encoder Wrong raised Zero"):
        in_numpy(Wrong(lambda x: 1 / 0))(np.zeros((2, 5), np.float32))  # type: ignore[misc]


@pytest.mark.parametrize(("what", "got"), [(nn.Linear(5, 4), r"shape \(2, 4\)"), (lambda x: None, "None")])
def test_features_of_another_number_are_named(what: Any, got: str) -> None:
    message = rf"the encoder Wrong has out_features 3, but its forward returned {got} instead of \(B, 3\)"
    with pytest.raises(ConfigError, match=message):
        encode(Wrong(what), torch.zeros(2, 5), "fp32")


def test_an_interrupt_is_no_error_of_an_encoder() -> None:
    def interrupted(x: torch.Tensor) -> None:
        raise Interrupted

    with pytest.raises(Interrupted):
        encode(Wrong(interrupted), torch.zeros(2, 5), "fp32")


def test_dictionary_options_go_where_they_fit() -> None:
    space = gym.spaces.Dict({"image": HWC, "vector": VECTOR})
    encoder = build("nature", space, depth=1, out_features=9)
    assert encoder.out_features == 9 + 64
    with pytest.raises(
        ConfigError, match=r"'scale', which the encoder does not take; it takes blocks, channels, depth, gain"
    ):
        build("auto", space, scale=1)
    with pytest.raises(ConfigError, match="empty Dict"):
        build("auto", gym.spaces.Dict({}))


needs_bf16 = pytest.mark.skipif(
    not (torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()),
    reason="this CPU does not compute in bfloat16",
)


@needs_bf16
@pytest.mark.parametrize("shape", [(64, 64, 3), (17, 30, 3)])
def test_onednn_tensors_change_the_speed_alone(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Features and every gradient agree with fp32 as well as the plain bf16 computation does."""
    encoder = ImpalaEncoder(gym.spaces.Box(0, 255, shape, np.uint8))
    images = torch.randint(0, 256, (16, *shape), dtype=torch.uint8)

    def features_and_gradients(precision: Any) -> list[torch.Tensor]:
        encoder.zero_grad()
        features = encode(encoder, images, precision)
        features.square().mean().backward()
        return [features.detach(), *(parameter.grad.clone() for parameter in encoder.parameters())]

    exact, fast = features_and_gradients("fp32"), features_and_gradients("bf16")
    monkeypatch.setattr("anybatch.models.impala.onednn_bf16", lambda _: False)
    plain = features_and_gradients("bf16")
    assert any(not torch.equal(a, b) for a, b in zip(fast, plain, strict=True))  # the two paths are two
    for reference, quick, slow in zip(exact, fast, plain, strict=True):
        error, usual = (quick - reference).norm(), (slow - reference).norm()
        assert error <= 1.5 * usual + 0.01 * reference.norm()


@needs_bf16
def test_weights_that_are_fixed_are_converted_once_and_give_the_same_bits() -> None:
    encoder = ImpalaEncoder(gym.spaces.Box(0, 255, (16, 16, 3), np.uint8), out_features=8)
    one, several = (torch.randint(0, 256, (batch, 16, 16, 3), dtype=torch.uint8) for batch in (1, 5))
    expected = [encode(encoder, x, "bf16").detach() for x in (one, several, one)]
    with fixed_weights(encoder):
        with torch.no_grad():
            for x, features in zip((one, several, one), expected, strict=True):
                assert torch.equal(encode(encoder, x, "bf16"), features)
            encoder.stacks[0].conv.weight.mul_(2)  # against the promise, to see that the first conversion is used
            assert torch.equal(encode(encoder, one, "bf16"), expected[0])
        assert not torch.equal(encode(encoder, one, "bf16"), expected[0])  # with gradient the present weights count
    with torch.no_grad():
        assert not torch.equal(encode(encoder, one, "bf16"), expected[0])


def test_images_reach_a_bf16_convolution_with_the_bits_they_would_have_by_way_of_float32() -> None:
    images = torch.arange(256, dtype=torch.uint8).reshape(1, 16, 16, 1)
    exact = to_nchw(images, "HWC")
    assert exact.dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        halved = to_nchw(images, "HWC")
        floats = to_nchw(images.float(), "HWC")  # of unknown range, and so not cast early
    assert halved.dtype == torch.bfloat16 and floats.dtype == torch.float32
    assert torch.equal(halved, exact.bfloat16())


def test_a_changed_forward_pass_is_not_recordable() -> None:
    class Branching(DictEncoder):
        def forward(self, observation: dict[str, Tensor]) -> Tensor:
            return super().forward(observation) * float(observation["a"].sum() > 0)

    class Wider(MlpEncoder):
        def vectors(self, observation: Tensor) -> Tensor:
            return super().vectors(observation)

    box = gym.spaces.Box(-1, 1, (2,))
    plain, hooked = (DictEncoder({"a": MlpEncoder(box)}) for _ in range(2))
    hooked.register_forward_hook(lambda *_: None)
    assert is_recordable(plain) and is_recordable(MlpEncoder(box))
    assert not any(map(is_recordable, (hooked, Branching({"a": MlpEncoder(box)}), Wider(box))))
