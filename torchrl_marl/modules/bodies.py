"""Bodies: the networks between inputs and heads.

A body is a module ``body(features, mask, context) -> (features, state)``. It reads all agents'
features, the mask of living agents (or None), and a context of further inputs. The ``state`` that
it returns is in the context of the next step; a body without memory returns None as ``state``.
The settings' names of the bodies are in :mod:`.registry`.

Shapes: B any batch dims, N agents, I input features, O output features.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.types import Device
from torchrl.modules import MLP

from torchrl_marl.errors import ConfigError, UserError
from torchrl_marl.modules.config import NetworkConfig
from torchrl_marl.modules.inputs import Features
from torchrl_marl.modules.networks import Context, Feedforward
from torchrl_marl.specs import GroupSpec

__all__ = [
    "ACTIVATIONS",
    "Context",
    "Feedforward",
    "PictureEncoder",
    "PictureNetwork",
    "Residual",
    "initialize",
    "make_cnn",
    "make_mlp",
    "make_own_body",
    "make_own_network",
    "make_simba",
]

_OUT_CHANNELS = (16, 32, 32)

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
    "elu": nn.ELU,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
}


def make_mlp(
    inputs: Features,
    out_features: int,
    config: NetworkConfig,
    *,
    gain: float,
    num_cells: Sequence[int] | None = None,
    activate_last_layer: bool = False,
    device: Device = None,
) -> nn.Module:
    """Builds a multi-layer perceptron, ``[*B, I] -> [*B, O]``.

    Args:
        inputs (Features): layout of the input.
        out_features (int): number of outputs O.
        config (NetworkConfig): widths, activation, and whether hidden layers are standardized by a
            ``LayerNorm`` without parameters.
        gain (float): gain of the last layer's orthogonal initialization; hidden layers use sqrt(2).
        num_cells (sequence of int, optional): widths of the hidden layers; default: the config's.
        activate_last_layer (bool): whether an activation follows the last layer.
        device (torch.device, optional): device of the parameters.

    Reference: Ba et al., 2016, https://arxiv.org/abs/1607.06450 (layer norm).

    Examples:
        >>> make_mlp(Features(3), 2, NetworkConfig([8]), gain=1.0)(torch.zeros(5, 3)).shape
        torch.Size([5, 2])
    """
    cells = list(config.num_cells if num_cells is None else num_cells)
    widths = [*cells, out_features] if activate_last_layer else cells
    network = MLP(
        in_features=inputs.width,
        out_features=out_features,
        num_cells=cells,
        activation_class=ACTIVATIONS[config.activation],
        activate_last_layer=activate_last_layer,
        norm_class=nn.LayerNorm if config.layer_norm else None,
        norm_kwargs=[{"normalized_shape": n, "elementwise_affine": False} for n in widths]
        if config.layer_norm
        else None,
        device=device,
    )
    initialize(network, gain)
    return network


def make_cnn(
    inputs: Features,
    out_features: int,
    config: NetworkConfig,
    *,
    device: Device = None,
    **settings: Any,
) -> PictureNetwork:
    """Builds convolutions for the images in a row of features, followed by a perceptron.

    Args:
        inputs, out_features, config, device: as in :func:`make_mlp`.
        **settings: ``gain``, ``num_cells`` and ``activate_last_layer`` of :func:`make_mlp`.

    Raises:
        ConfigError: the input has no image, or agents of one network have images of different
            shapes.

    Examples:
        >>> from torchrl_marl.modules.inputs import Picture
        >>> row = Features(77, (Picture(0, (5, 5, 3), "camera"),))  # and two numbers
        >>> make_cnn(row, 2, NetworkConfig([8]), gain=1.0)(torch.zeros(4, 77)).shape
        torch.Size([4, 2])
    """
    if inputs.pictures is None:
        raise ConfigError(
            "body is 'cnn', but agents that share a network have images of different shapes; "
            "use sharing=group, with a network for each kind, or body=mlp."
        )
    if not inputs.pictures:
        raise ConfigError(
            "body is 'cnn', but no observation is an image, [H, W, C] or [C, H, W]; use body=mlp."
        )
    activation = ACTIVATIONS[config.activation]
    encoders = {
        (one.leaf, one.shape): PictureEncoder(one.shape, activation, device, config.channels)
        for one in inputs.pictures
    }
    encoded = sum(encoders[one.leaf, one.shape].width for one in inputs.pictures)
    others = inputs.width - sum(math.prod(one.shape) for one in inputs.pictures)
    mlp = make_mlp(Features(encoded + others), out_features, config, device=device, **settings)
    return PictureNetwork(inputs, encoders, mlp)


def make_simba(
    inputs: Features,
    out_features: int,
    config: NetworkConfig,
    *,
    gain: float,
    num_cells: Sequence[int] | None = None,
    activate_last_layer: bool = False,
    device: Device = None,
) -> nn.Sequential:
    r"""Builds a SimBa network: a projection, residual blocks, a layer norm and a last layer.

    Each hidden layer is a residual block, :math:`x + W_2 \max(0, W_1 \operatorname{norm}(x) + b_1)
    + b_2`, in which :math:`W_1` has four times as many outputs as inputs. A projection precedes the
    first block, and each block of another width.

    Args:
        inputs, out_features, config, device: as in :func:`make_mlp`.
        gain (float): gain of the last layer's orthogonal initialization. That of the projections is
            1, and the layers of the blocks have He initialization.
        num_cells (sequence of int, optional): widths of the blocks; default: the config's.
        activate_last_layer (bool): whether the network ends with a block and a layer norm. The
            block is as wide as the config's last one, and followed by a projection if
            ``out_features`` differs.

    Shapes:
        - features: ``[*B, I]``; returns ``[*B, O]``

    Reference: Lee et al., 2024, https://arxiv.org/abs/2410.09754 (section 4).

    Reduces to: a linear layer, without hidden layers.

    Examples:
        >>> network = make_simba(Features(3), 2, NetworkConfig([8, 8]), gain=1.0)
        >>> [type(layer).__name__ for layer in network]
        ['Linear', 'Residual', 'Residual', 'LayerNorm', 'Linear']
    """
    cells = [*(config.num_cells if num_cells is None else num_cells)]
    cells += [config.num_cells[-1]] if activate_last_layer else []
    layers: list[nn.Module] = []
    width = inputs.width
    for cell in cells:
        if cell != width or not layers:
            layers.append(_make_orthogonal_layer(width, cell, 1.0, device))
        layers.append(_make_residual_block(cell, device))
        width = cell
    if cells:
        layers.append(nn.LayerNorm(width, device=device))
    if not activate_last_layer or out_features != width:
        layers.append(_make_orthogonal_layer(width, out_features, gain, device))
    return nn.Sequential(*layers)


class Residual(nn.Sequential):
    """Sequence of layers with a residual connection: the input is added to the output.

    Shapes:
        - features: ``[*B, I]``; returns ``[*B, I]``

    Examples:
        >>> Residual(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))(torch.zeros(5, 8)).shape
        torch.Size([5, 8])
    """

    def forward(self, features: Tensor) -> Tensor:
        """Runs the layers."""
        return features + super().forward(features)


def _make_residual_block(width: int, device: Device) -> Residual:
    """Builds a block of SimBa, with a hidden layer four times as wide."""
    first = nn.Linear(width, 4 * width, device=device)
    last = nn.Linear(4 * width, width, device=device)
    for layer in (first, last):
        nn.init.kaiming_normal_(layer.weight)
        nn.init.zeros_(layer.bias)
    return Residual(nn.LayerNorm(width, device=device), first, nn.ReLU(), last)


def _make_orthogonal_layer(
    in_features: int, out_features: int, gain: float, device: Device
) -> nn.Linear:
    """Builds a linear layer with orthogonal weights, and biases of 0."""
    layer = nn.Linear(in_features, out_features, device=device)
    initialize(layer, gain)
    return layer


class PictureEncoder(nn.Module):
    """Three convolutions; each halves both sides of its input if the longer one exceeds 8 pixels.

    Args:
        shape (tuple of int): ``(H, W, C)`` or ``(C, H, W)``.
        activation (type): activation after each convolution.
        device (torch.device, optional): device of the parameters.
        channels ("first" or "last", optional): position of the channel dim; None: the smaller of
            the first and the last dim, or the last if they are equal.

    Shapes:
        - pictures: ``[M, *shape]``; returns ``[M, width]``

    Examples:
        >>> encoder = PictureEncoder((20, 30, 3), nn.ReLU)
        >>> encoder(torch.zeros(4, 20, 30, 3)).shape, encoder.width  # 32 channels of 5 x 8
        (torch.Size([4, 1280]), 1280)
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        activation: type[nn.Module],
        device: Device = None,
        channels: str | None = None,
    ) -> None:
        super().__init__()
        self.channels_last = shape[-1] <= shape[0] if channels is None else channels == "last"
        in_channels, *sides = (shape[-1], *shape[:2]) if self.channels_last else shape
        layers: list[nn.Module] = []
        for out_channels in _OUT_CHANNELS:
            stride = 2 if max(sides) > 8 else 1
            layers += [
                nn.Conv2d(in_channels, out_channels, 3, stride, padding=1, device=device),
                activation(),
            ]
            in_channels, sides = out_channels, [(side - 1) // stride + 1 for side in sides]
        self.layers = nn.Sequential(*layers)
        self.width = in_channels * sides[0] * sides[1]
        initialize(self, math.sqrt(2.0))

    def forward(self, pictures: Tensor) -> Tensor:
        """Runs the convolutions."""
        pictures = pictures.movedim(-1, -3) if self.channels_last else pictures
        return self.layers(pictures).flatten(-3)


class PictureNetwork(nn.Module):
    """Encodes the images in a row of features; a perceptron reads encodings and other features.

    Images with the same leaf and shape, such as those of all agents that a centralized critic sees,
    share convolutions.

    Args:
        inputs (Features): layout of the input, with the images.
        encoders (mapping): (leaf, shape) -> encoder of such images.
        head (nn.Module): perceptron that reads the encodings in order, then all other features.

    Shapes:
        - features: ``[*B, I]``; returns ``[*B, O]``
    """

    def __init__(
        self,
        inputs: Features,
        encoders: Mapping[tuple[str, tuple[int, int, int]], nn.Module],
        head: nn.Module,
    ) -> None:
        super().__init__()
        assert inputs.pictures is not None
        self.in_features = inputs.width
        self.pictures = inputs.pictures
        self.encoders = nn.ModuleList(encoders.values())
        self.encoder_of = [[*encoders].index((p.leaf, p.shape)) for p in self.pictures]
        self.head = head
        edges = [0]
        for picture in sorted(self.pictures):
            edges += [picture.start, picture.start + math.prod(picture.shape)]
        self.others = [*zip(edges[::2], [*edges[1::2], inputs.width])]

    def forward(self, features: Tensor) -> Tensor:
        """Encodes the images and runs the perceptron."""
        batch, rows = features.shape[:-1], features.reshape(-1, self.in_features)
        encodings: dict[int, Tensor] = {}
        for k, encoder in enumerate(self.encoders):
            picture_indices = [i for i, number in enumerate(self.encoder_of) if number == k]
            encoded = encoder(torch.cat([self._cut_out_picture(rows, i) for i in picture_indices]))
            encodings |= dict(zip(picture_indices, encoded.chunk(len(picture_indices))))
        parts = [encodings[i] for i in range(len(self.pictures))]
        parts += [rows[:, start:end] for start, end in self.others if end > start]
        output = self.head(torch.cat(parts, -1))
        return output.reshape(*batch, output.shape[-1])

    def _cut_out_picture(self, rows: Tensor, i: int) -> Tensor:
        start, shape, _, scale = self.pictures[i]
        picture = rows[:, start : start + math.prod(shape)].unflatten(-1, shape)
        return picture if scale == 1.0 else picture * scale


@torch.no_grad()
def initialize(network: nn.Module, gain: float) -> None:
    """Initializes weights orthogonally, those of the last layer with ``gain``; biases are 0."""
    weights = []
    for name, parameter in network.named_parameters():
        if name.endswith("bias"):
            parameter.zero_()
        else:
            weights.append(parameter)
    for weight in weights:
        scale = gain if weight is weights[-1] else math.sqrt(2.0)
        for member in weight if weight.ndim == 3 else [weight]:
            nn.init.orthogonal_(member, scale)


def make_own_network(
    make: Callable[..., Any],
    inputs: Features,
    out_features: int,
    config: NetworkConfig,
    **settings: Any,
) -> nn.Module:
    """Builds one agent's network with a user's builder, and runs it once on zeros.

    Args:
        make (callable): the builder.
        inputs, out_features, config, **settings: its arguments.

    Shapes:
        - features: ``[*B, I]``; the network returns ``[*B, O]``

    Raises:
        ConfigError: the builder or its network raises an exception, or returns something else.

    Examples:
        >>> def make(inputs, out_features, config):
        ...     return nn.Linear(inputs.width, out_features)
        >>> make_own_network(make, Features(3), 2, NetworkConfig())
        Linear(in_features=3, out_features=2, bias=True)
    """
    network = _call_builder(make, inputs, out_features, config, **settings)
    features = torch.zeros(2, inputs.width, device=settings.get("device"))
    _check_output(make, features, _run_on_zeros(make, network, features), out_features)
    return network


def make_own_body(
    make: Callable[..., Any],
    group: GroupSpec,
    out_features: int,
    config: NetworkConfig,
    **settings: Any,
) -> nn.Module:
    """Builds a network over all agents with a user's builder, and runs it once on zeros.

    Args:
        make (callable): the builder.
        group, out_features, config, **settings: its arguments.

    Shapes:
        - features: ``[*B, N, I]``; mask: ``[*B, N]``, or None in a group without a mask
        - the network returns ``([*B, N, O], None)``

    Raises:
        ConfigError: the builder or its network raises an exception, or returns something else.
    """
    network = _call_builder(make, group, out_features, config, **settings)
    size = 2, group.n_agents, group.observation_dim
    features = torch.zeros(size, device=settings.get("device"))
    mask = None if group.mask_key is None else torch.ones_like(features[..., 0], dtype=torch.bool)
    found = _run_on_zeros(make, network, features, mask, Context())
    if not (isinstance(found, tuple) and len(found) == 2 and found[1] is None):
        raise ConfigError(
            f"body: the network of {_name_of(make)} must return (features, None); a body over all "
            "agents has no memory, which networks of single agents have (memory=gru)."
        )
    _check_output(make, features, found[0], out_features)
    return network


def _call_builder(make: Callable[..., Any], *given: Any, **settings: Any) -> nn.Module:
    try:
        network = make(*given, **settings)
    except Exception as error:
        raise _to_user_error(f"{_name_of(make)} fails", error) from error
    if not isinstance(network, nn.Module):
        raise ConfigError(
            f"body: {_name_of(make)} returns a {type(network).__name__}, expected a "
            "torch.nn.Module."
        )
    return network


def _run_on_zeros(make: Callable[..., Any], network: nn.Module, *inputs: Any) -> Any:
    """Returns a network's output; dropout and the statistics of norms stay untouched."""
    modes = [(module, module.training) for module in network.modules()]
    network.eval()
    try:
        with torch.no_grad():
            return network(*inputs)
    except Exception as error:
        size = list(inputs[0].shape)
        raise _to_user_error(
            f"the network of {_name_of(make)} fails on zeros {size}", error
        ) from error
    finally:
        for module, training in modes:
            module.training = training


def _to_user_error(what: str, error: Exception) -> UserError:
    if isinstance(error, UserError):
        return error
    why = " ".join(f"{type(error).__name__}: {error}".split())
    return ConfigError(f"body: {what}: {why.rstrip('.')}.")


def _check_output(
    make: Callable[..., Any], features: Tensor, output: Any, out_features: int
) -> None:
    expected = [*features.shape[:-1], out_features]
    found = list(output.shape) if isinstance(output, Tensor) else type(output).__name__
    if found != expected:
        raise ConfigError(
            f"body: the network of {_name_of(make)} returns {found} for features "
            f"{list(features.shape)}, expected {expected}: out_features is {out_features}."
        )


def _name_of(make: Callable[..., Any]) -> str:
    return getattr(make, "__qualname__", type(make).__name__)
