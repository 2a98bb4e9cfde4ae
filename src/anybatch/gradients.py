"""The gradients of a minibatch: operation by operation, or as one compiled program (``compile: true``).

On small networks PyTorch needs longer to dispatch the hundred operations of a gradient step than to compute them. A
program dispatches them once: forward pass, loss, backward pass and clipping are recorded as one graph, from the code
that otherwise runs, and Inductor compiles it, on a CPU with its C++ wrapper. The numbers of the configuration become
constants; weights, buffers and data are inputs. The optimiser and the EWMA follow as they are. Where something comes
between gradients and clipping (several parts of a minibatch, workers, the noise scale) the program does not clip.

There is one program for each loss and each shape of a minibatch. The first ever takes 20 s to compile, and 2 s once it
is in Inductor's cache on disk.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from anybatch.errors import ConfigError
from anybatch.minibatches import FlatRecord
from anybatch.optimizers import clip_gradients_, gradients_of

Part = TypeVar("Part", bound=FlatRecord)

Losses: TypeAlias = tuple[Tensor, Mapping[str, Tensor], Sequence[Tensor]]
"""A scalar loss with its gradient; its terms by name for the log; and outputs to keep for statistics."""


_DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {  # of operations that Inductor does not fuse
    torch.ops.aten._foreach_norm.Scalar: lambda tensors, *_: [torch.linalg.vector_norm(x) for x in tensors]
}


class Outcome(NamedTuple):
    """Values that come with the gradients of a part of a minibatch, without gradient themselves."""

    terms: Mapping[str, Tensor]
    """Terms of the loss by name."""
    kept: Sequence[Tensor]
    """Outputs for statistics."""


AddGradients: TypeAlias = Callable[[Part, float, float | None], Outcome]
""":func:`add_gradients` of certain losses and parameters: of a part, its weight, and the norm to clip to."""


def add_gradients(
    losses_of: Callable[[Part], Losses],
    parameters: Sequence[Parameter],
    part: Part,
    weight: float,
    max_norm: float | None = None,
) -> Outcome:
    """Add the gradients of a part of a minibatch to those of the parameters, operation by operation.

    Args:
        losses_of: gives the loss of the part, a mean over its samples.
        parameters: those that are trained.
        part: (B, ...), or (R, B, ...) for R stacked runs.
        weight: of the part, its fraction of the minibatch.
        max_norm: for a part that is the whole minibatch, the norm to which the gradients are clipped.
    """
    loss, terms, kept = losses_of(part)
    # a loss is a mean over all runs, and each run's gradient is that of its own loss
    (loss * (weight * part.runs)).backward()
    clip_gradients_(gradients_of(parameters), max_norm, run_axis=part.run_axis)
    return Outcome(terms, kept)


class Program(NamedTuple):
    """A compiled graph for one loss and one shape of a minibatch."""

    run: Callable[..., Sequence[Tensor]]
    """Takes the largest norm, and the tensors of networks and data; returns gradients, terms, and computed outputs."""
    trained: list[str]
    """Names of the parameters that have a gradient, in its order."""
    terms: list[str]
    """Names of the terms."""
    kept: list[int]
    """Indices of the outputs for statistics, among those that it computed and then its inputs."""


class CompiledGradients(Generic[Part]):
    """:func:`add_gradients` with a compiled program for each shape of a part."""

    def __init__(
        self,
        losses_of: Callable[[Part], Losses],
        modules: Sequence[nn.Module],
        parameters: Sequence[Parameter],
        programs: dict[Any, Program],
    ) -> None:
        """Look up the present tensors of the modules.

        Args:
            losses_of: gives the loss of a part.
            modules: the networks that it uses.
            parameters: those that are trained.
            programs: the compiled ones of these losses, to which new ones are added.
        """
        self._caller = _Caller(losses_of, modules)
        tensors = {**dict(self._caller.named_parameters()), **dict(self._caller.named_buffers())}
        self._names = list(tensors)
        self._tensors = [x.detach() for x in tensors.values()]  # in the same memory
        trained = {id(x) for x in parameters if x.requires_grad}  # others stay as they are, without a gradient
        self._trained = {name: x for name, x in tensors.items() if id(x) in trained}
        self._programs = programs
        self._no_limit = torch.full((), math.inf, device=self._tensors[0].device)
        self._limits: dict[float | None, Tensor] = {None: self._no_limit}

    def __call__(self, part: Part, weight: float, max_norm: float | None = None) -> Outcome:
        """Add the gradients of ``part``, with the arguments of :func:`add_gradients`.

        Raises:
            ConfigError: the networks or the loss cannot be compiled.
        """
        data = part.tensors()
        layout = (weight, *[(x.shape, x.stride()) for x in data])
        program = self._programs.get(layout) or self._compile(layout, part, weight)
        if max_norm is not None and max_norm not in self._limits:
            self._limits[max_norm] = torch.full_like(self._no_limit, max_norm)
        inputs = [self._limits[max_norm], *self._tensors, *data]
        with torch.no_grad():
            outputs = program.run(*inputs)
        gradients, others = outputs[: len(program.trained)], outputs[len(program.trained) :]
        for name, gradient in zip(program.trained, gradients, strict=True):
            parameter = self._trained[name]
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        available = [*others[len(program.terms) :], *inputs]
        return Outcome(dict(zip(program.terms, others, strict=False)), [available[i] for i in program.kept])

    def _compile(self, layout: Any, part: Part, weight: float) -> Program:
        device = self._tensors[0].device
        try:
            with _compiling():
                program = self._record(part, weight, {"cpp_wrapper": True} if device.type == "cpu" else {})
        except Exception as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise ConfigError(
                f"compile is true, but a gradient step of this network cannot be compiled ({reason}); set it to false"
            ) from error
        self._programs[layout] = program
        return program

    def _record(self, part: Part, weight: float, options: dict[str, Any]) -> Program:
        from torch._inductor import compile as inductor  # slow to import, and rarely needed
        from torch.fx.experimental.proxy_tensor import make_fx

        trained: list[str] = []
        names: list[str] = []
        kept: list[int] = []

        def step(*inputs: Tensor) -> list[Tensor]:
            """The outputs of a program as a function of its inputs."""
            max_norm, *rest = inputs
            tensors, data = dict(zip(self._names, rest, strict=False)), iter(rest[len(self._names) :])
            variables = {name: tensors[name].detach().requires_grad_() for name in self._trained}
            same_part = part.map(lambda _: next(data))
            loss, terms, outputs = torch.func.functional_call(self._caller, tensors | variables, (same_part,))
            every = torch.autograd.grad(loss * (weight * part.runs), list(variables.values()), allow_unused=True)
            # in the layout of the parameters, as autograd leaves them: the fused optimisers rely on it
            present = {name: x for name, x in zip(variables, every, strict=True) if x is not None}
            pairs = [(x, variables[name]) for name, x in present.items()]
            gradients = [x if x.stride() == y.stride() else torch.empty_like(y).copy_(x) for x, y in pairs]
            trained[:] = present
            names[:] = terms
            # what is only handed through need not be an output
            computed = [x for x in outputs if not any(x is y for y in inputs)]
            computed = list({id(x): x for x in computed}.values())
            available = [*map(id, computed), *map(id, inputs)]
            kept[:] = [available.index(id(x)) for x in outputs]
            clip_gradients_(gradients, max_norm)
            return [*gradients, *terms.values(), *computed]

        inputs: list[Any] = [self._no_limit, *self._tensors, *part.tensors()]
        with _unchanged(self._caller):
            graph = make_fx(step, _DECOMPOSITIONS, tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs)
        with torch.no_grad():
            run = inductor(graph, inputs, options=options)
        return Program(run, trained, names, kept)


class _Caller(nn.Module):
    """Calls a function of modules, whose tensors :func:`torch.func.functional_call` can then replace."""

    def __init__(self, function: Callable[..., Any], modules: Sequence[nn.Module]) -> None:
        super().__init__()
        self.networks = nn.ModuleList(modules)
        self._function = function

    def forward(self, *arguments: Any) -> Any:
        return self._function(*arguments)


@contextlib.contextmanager
def _unchanged(module: nn.Module) -> Iterator[None]:
    """Put a module's own tensors back: of one with two names, ``functional_call`` leaves a replaced one behind."""
    owners: list[dict[str, Any]] = [x for part in module.modules() for x in (part._parameters, part._buffers)]
    places = [(place, dict(place)) for place in owners]
    try:
        yield
    finally:
        for place, before in places:
            place.update(before)


@contextlib.contextmanager
def _compiling() -> Iterator[None]:
    """Let ``torch.compiler.is_compiling()`` be true, as within torch.compile, and modules run uncompiled."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        torch.compiler._is_compiling_flag = before


TESTED = "2.13"
"""The version of PyTorch with which compiling was tested; it uses functions that are not public."""

_NEEDED = (
    ("torch.compiler", "_is_compiling_flag"),
    ("torch.compiler", "set_stance"),
    ("torch.fx.experimental.proxy_tensor", "make_fx"),
    ("torch._inductor", "compile"),
    ("torch._inductor.cpp_builder", "get_cpp_compiler"),
    ("torch.utils._triton", "has_triton"),
)


def check_compiler(device: torch.device) -> None:
    """Check that programs can be compiled for ``device``; warn about a version of PyTorch that was not tested.

    Raises:
        ConfigError: the compiler is missing, or PyTorch lacks a function that is needed.
    """
    version = torch.__version__
    if not version.startswith(f"{TESTED}."):
        warnings.warn(
            f"compile is true, which was tested only with PyTorch {TESTED}, but this is {version}: compare the first "
            "rows of progress.csv with those of a run without it",
            stacklevel=2,
        )
    try:
        for module, name in _NEEDED:
            getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"compile is true, but PyTorch {version} lacks a feature that it needs ({error}): install PyTorch "
            f"{TESTED}, or set it to false"
        ) from error
    if device.type == "cpu":
        from torch._inductor.cpp_builder import get_cpp_compiler

        try:
            get_cpp_compiler()
        except Exception as error:
            raise ConfigError(
                "compile is true, but no C++ compiler was found: install g++, or set it to false"
            ) from error
    else:
        from torch.utils._triton import has_triton

        if not has_triton():
            raise ConfigError("compile is true, but Triton does not run on this GPU: install it, or set it to false")
