"""What a module has in place of a weight while that is not on the device."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch

from splitzip_aio.errors import UnsupportedError

__all__ = ["OffloadWarning", "OffloadedWeight"]

_TELLS = (
    "device dtype shape ndim layout requires_grad grad grad_fn is_leaf nbytes itemsize names is_cpu is_cuda is_meta "
    "is_sparse is_sparse_csr is_mkldnn is_mps is_xpu is_xla is_quantized is_nested _version"
)
_ANSWERS = (
    "size stride dim ndimension numel nelement element_size is_floating_point is_complex is_signed get_device "
    "is_inference is_contiguous __len__ is_conj is_neg"
)
_CONVERSIONS = "to cuda cpu half float double bfloat16"
_ADDRESSES = "data_ptr untyped_storage storage _typed_storage share_memory_ pin_memory is_set_to"


class OffloadWarning(UserWarning):
    """A model works, and slower than it could; the text says why and what to do."""


class OffloadedWeight(torch.nn.Parameter):
    """A parameter that has no memory, and knows everything of a weight but its values.

    Whoever asks for its dtype, shape or device gets those of the weight in use. Whoever needs its values elsewhere than
    in its unit's forward gets a copy, made for the occasion, and a warning; for ``detach``, by which
    ``state_dict`` takes them, on the CPU and without a warning. Writing is refused: nobody would see what was written.
    """

    _unit: str
    _label: str
    _load: Callable[[], torch.Tensor]

    @classmethod
    def make(
        cls,
        label: str,
        unit: str,
        dtype: torch.dtype,
        shape: tuple[int, ...],
        device: torch.device,
        load: Callable[[], torch.Tensor],
    ) -> OffloadedWeight:
        """A placeholder of the weight named ``label``; ``load`` brings its values to the CPU."""
        weight: OffloadedWeight = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=dtype, device=device, requires_grad=False
        )
        weight._label, weight._unit, weight._load = label, unit, load
        return weight

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Answer what is known, refuse what writes, and fetch the values for what remains."""
        options = kwargs or {}
        if func is torch._has_compatible_shallow_copy_type:  # ``model.to`` asks, and then sets ``data``; see below
            return True
        if func in _KNOWN:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **options)
        weight = next(_placeholders([*args, *options.values()]))
        if func is torch.Tensor.detach:
            return weight._load()
        if func in _CONVERTING and weight is args[0]:
            return weight._convert(func, args[1:], options)
        if func in _GRADIENTS:
            return weight._check_gradients(args[1] if len(args) > 1 else options.get("requires_grad", True))
        if func == torch.Tensor.data.__set__ and args[1] is weight:  # type: ignore[attr-defined]
            return None  # the end of ``model.to``, where nothing was to be done
        if _writes(func, options):
            return weight._refuse(_name(func))
        weight._warn(_name(func))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*_fetched(args), **_fetched(options))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """What bypasses ``__torch_function__``."""
        return next(_placeholders([*args, *(kwargs or {}).values()]))._refuse(str(func))

    def _convert(self, func: Callable[..., Any], args: Sequence[Any], options: Mapping[str, Any]) -> OffloadedWeight:
        """``to`` and its like, as long as there is nothing to convert."""
        with torch._C.DisableTorchFunctionSubclass():
            target = func(torch.zeros((), dtype=self.dtype, device=self.device), *args, **options)
        if (target.device, target.dtype) == (self.device, self.dtype):
            return self
        raise UnsupportedError(
            f"{self._label!r} is offloaded, and cannot become {target.dtype} on {target.device}: its values stay as "
            "the cache has them; call splitzip_aio.detach(model) first, or leave this model out"
        )

    def _check_gradients(self, wanted: bool) -> OffloadedWeight:
        if not wanted:
            return self
        raise UnsupportedError(
            f"{self._label!r} is offloaded, and cannot be trained: it is read from the cache for each forward pass; "
            "train weights of your own beside it, or call splitzip_aio.detach(model) first"
        )

    def _refuse(self, what: str) -> NoReturn:
        raise UnsupportedError(
            f"{what}: {self._label!r} is offloaded, and has memory only while {self._unit!r} runs its forward, with "
            "the values that the cache has; call splitzip_aio.detach(model) first"
        )

    def _warn(self, what: str) -> None:
        warnings.warn(
            f"{what}: the values of {self._label!r} are needed outside of the forward of {self._unit!r}, and are read "
            "for this one use, which is slow; give offload(units=[...]) the module that uses them",
            OffloadWarning,
            stacklevel=3,
        )

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return (
            f"OffloadedWeight({self._label!r}, shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device}, "
            f"unit={self._unit!r})"
        )

    def __deepcopy__(self, memo: object) -> NoReturn:
        self._refuse("copying")

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        self._refuse("pickling")


def _placeholders(values: Sequence[Any]) -> Iterator[OffloadedWeight]:
    for value in values:
        if isinstance(value, OffloadedWeight):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _placeholders(value)
        elif isinstance(value, Mapping):
            yield from _placeholders(list(value.values()))


def _fetched(value: Any) -> Any:
    """The same, with values in place of placeholders."""
    if isinstance(value, OffloadedWeight):
        return value._load().to(value.device)
    if isinstance(value, (list, tuple)):
        return [_fetched(each) for each in value] if isinstance(value, list) else tuple(map(_fetched, value))
    if isinstance(value, Mapping):
        return {key: _fetched(each) for key, each in value.items()}
    return value


def _writes(func: Callable[..., Any], options: Mapping[str, Any]) -> bool:
    """Whether a function might write to its arguments, or hand out memory to write to."""
    name = getattr(func, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    assigns = name in {"__set__", "__setitem__", "__delitem__"} or (name[:3] == "__i" and name not in _READING)
    return in_place or assigns or options.get("out") is not None or func in _ADDRESSING or func == _DATA


def _name(func: Callable[..., Any]) -> str:
    """What was called, or the attribute that was read or set."""
    name = getattr(func, "__name__", str(func))
    return getattr(func.__self__, "__name__", name) if name in {"__get__", "__set__"} else name  # type: ignore[attr-defined]


def _methods(names: str) -> Iterator[Callable[..., Any]]:
    for name in names.split():
        for owner in (torch.Tensor, torch):
            if hasattr(owner, name):
                yield getattr(owner, name)


def _getters(names: str) -> Iterator[Callable[..., Any]]:
    return (getattr(torch.Tensor, name).__get__ for name in names.split() if hasattr(torch.Tensor, name))


_READING = frozenset({"__index__", "__int__", "__invert__"})
_KNOWN = frozenset({*_getters(_TELLS), *_methods(_ANSWERS)})
_CONVERTING = frozenset(getattr(torch.Tensor, name) for name in _CONVERSIONS.split())
_ADDRESSING = frozenset(_methods(_ADDRESSES))
_GRADIENTS = frozenset({torch.Tensor.requires_grad_, torch.Tensor.requires_grad.__set__})  # type: ignore[attr-defined]
_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]
