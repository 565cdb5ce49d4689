"""Tensors without contents, by which a model is traced whose weights are not here.

Each has a fingerprint in place of its contents: a hash of the operator that has made it, and of the fingerprints of
what that was given. Weights begin with one of their name, and tensors with contents have one of these:

    weight                     ->  a = hash("weight")
    input                      ->  b = hash(its bytes)
    aten.mm(input, weight)     ->  c = hash("aten.mm", b, a)

Two runs with the same fingerprints have called the same operators, in the order of the data, on the same weights: so
they compute the same, to the bit, with whatever contents. That is more than numbers that are close can show.

What depends on inputs alone keeps its contents, so that code may look into masks. It may not look into what follows
from weights.
"""

import functools
import hashlib
import zlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef

from funcpipe.errors import ModelError
from funcpipe.model.tensors import is_dense


class Weightless(FakeTensorMode):  # type: ignore[no-untyped-call]
    """Computes shapes, types and fingerprints of what operators make of tensors without contents."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self._known: dict[int, tuple[Any, str]] = {}  # by the identity of storages: a weak reference, the fingerprint
        self._kept: dict[Any, tuple[Any, int, str]] = {}  # by place in memory: its storage, a checksum, the hash
        self._depth = 0
        self._forms: dict[Any, tuple[_Form | None, ...]] = {}  # of results, by operator and forms of what it is given

    def empty(self, tensor: Tensor, name: str) -> Tensor:
        """A tensor like `tensor`, which is on the meta device, with the fingerprint of its `name`."""
        cpu = torch.device("cpu")
        fake: Tensor = self.fake_tensor_converter.from_meta_and_device(self, tensor.detach(), cpu)
        self._know(fake, f"weight {name}")
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(fake, tensor.requires_grad)
        return fake

    def fingerprint(self, tensor: Tensor) -> str:
        """The fingerprint of a tensor with or without contents."""
        where = tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()) if is_dense(tensor) else ()
        if not isinstance(tensor, FakeTensor):
            return _hash(where, self._of_contents(tensor))
        return _hash(where, tensor.storage_offset(), self._of_storage(tensor))

    def _of_contents(self, tensor: Tensor) -> str:
        """The hash of contents. That of a large tensor, such as a mask that all blocks read, is kept with a checksum,
        which is faster to compute, and computed again when what is in its memory has another one.
        """
        if not is_dense(tensor) or tensor.nbytes < _LARGE:
            return _contents(tensor)
        storage = tensor.untyped_storage()
        place = storage._cdata, tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()), tensor.storage_offset()
        check = zlib.crc32(_bytes(tensor))
        reference, known, found = self._kept.get(place, (None, 0, ""))
        if reference is None or reference.expired() or known != check:
            found = _contents(tensor)
            self._kept = {key: entry for key, entry in self._kept.items() if not entry[0].expired()}
            self._kept[place] = StorageWeakRef(storage), check, found  # type: ignore[no-untyped-call]
        return found

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute the form of what `func` makes, and its fingerprint."""
        kwargs = kwargs or {}
        if self._depth or func in _FACTS or func.namespace == "prim":
            return super().dispatch(func, types, args, kwargs)
        written = _flat(_written(func, args, kwargs))
        if any(isinstance(leaf, Tensor) and not isinstance(leaf, FakeTensor) for leaf in written):
            raise ModelError(
                f"the code writes what follows from weights into a tensor that does not ({func}); make that tensor "
                "from one that does, such as x.new_zeros(shape) in place of torch.zeros(shape)"
            )
        draws = _draw() if _draws(func, args, kwargs) else 0
        leaves = _flat((args, kwargs))
        given = [self._given(leaf) for leaf in leaves]
        before = {leaf.untyped_storage()._cdata for leaf in leaves if isinstance(leaf, Tensor)}
        result = self._computed(func, types, args, kwargs)
        made = [leaf for leaf in _flat(result) if isinstance(leaf, FakeTensor)]
        new = [leaf for leaf in made if leaf.untyped_storage()._cdata not in before]
        copied = self._copied(func, args, result)
        for number, leaf in enumerate([*written, *new]):
            if isinstance(leaf, FakeTensor):
                self._know(leaf, copied or _hash(str(func), draws, given, number))
        return result

    def _computed(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """The forms of what `func` makes, which are computed once for arguments of the same forms."""
        key = _form_key(func, args, kwargs)
        leaves = _flat((args, kwargs))
        forms = None if key is None else self._forms.get(key)
        if forms is not None:
            with torch._C._DisableTorchDispatch():
                made = [None if form is None else form.made(self, leaves) for form in forms]
            return made[0] if len(made) == 1 else tuple(made)
        self._depth += 1
        try:
            result = super().dispatch(func, types, args, kwargs)
        finally:
            self._depth -= 1
        if key is not None and (forms := _forms_of(result, leaves)) is not None:
            self._forms[key] = forms
        return result

    def _copied(self, func: Any, args: Any, result: Any) -> str | None:
        """The fingerprint of the storage of a plain copy, which is the original's; None for anything else."""
        if func not in _COPIES or not isinstance(result, FakeTensor):
            return None
        source = args[1] if func is torch.ops.aten.copy_.default else args[0]
        alike = isinstance(source, FakeTensor) and source.dtype == result.dtype and source.shape == result.shape
        return self._of_storage(source) if alike and _is_whole(source) and _is_whole(result) else None

    def _given(self, leaf: Any) -> Any:
        """What an argument of an operator is, for the fingerprints of what that makes."""
        if not isinstance(leaf, FakeTensor) or not is_dense(leaf):
            return self.fingerprint(leaf) if isinstance(leaf, Tensor) else repr(leaf)
        return leaf.dtype, *leaf.shape, leaf.stride(), leaf.storage_offset(), self._of_storage(leaf)

    def _of_storage(self, tensor: Tensor) -> str:
        reference, found = self._known.get(tensor.untyped_storage()._cdata, (None, ""))
        return found if reference is not None and not reference.expired() else "unknown"

    def _know(self, tensor: Tensor, found: str) -> None:
        if len(self._known) > _MOST:
            self._known = {key: entry for key, entry in self._known.items() if not entry[0].expired()}
        storage = tensor.untyped_storage()
        self._known[storage._cdata] = StorageWeakRef(storage), found  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True)
class _Form:
    """What an operator returns: its argument of this number, or a view of it if there is a `shape`; or a new tensor."""

    argument: int | None
    shape: tuple[int, ...] | None = None
    stride: tuple[int, ...] = ()
    offset: int = 0
    dtype: torch.dtype = torch.float32

    def made(self, mode: FakeTensorMode, leaves: list[Any]) -> Tensor:
        """The result, for the arguments `leaves`."""
        if self.shape is None:
            given: Tensor = leaves[self.argument or 0]
            return given
        if self.argument is None:
            plain = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")
        else:
            plain = torch.empty(0, dtype=self.dtype, device="meta")
            plain.set_(leaves[self.argument].untyped_storage(), self.offset, self.shape, self.stride)
        return FakeTensor(mode, plain, torch.device("cpu"))


def placed(tensor: Tensor, storage: torch.UntypedStorage) -> Tensor:
    """A tensor like one without contents, in another storage without contents."""
    assert isinstance(tensor, FakeTensor)
    plain = torch.empty(0, dtype=tensor.dtype, device="meta")
    plain.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
    return FakeTensor(tensor.fake_mode, plain, tensor.fake_device)


def _form_key(func: Any, args: Any, kwargs: Any) -> Any:
    """The operator with the forms of its arguments, on which alone those of its results depend; None where that is
    not so, or where it changes more of its arguments than their contents.
    """
    if torch.Tag.inplace_view in func.tags or not _is_of_forms(func):
        return None
    parts: list[Any] = [func]
    for leaf in _flat((args, kwargs), marked=True):
        if not isinstance(leaf, Tensor):
            parts.append((type(leaf), leaf))
            continue
        device = leaf.fake_device if isinstance(leaf, FakeTensor) else leaf.device
        if not is_dense(leaf) or leaf.dtype.is_complex or device.type != "cpu":
            return None
        if not leaf.dim() and not isinstance(leaf, FakeTensor):
            return None  # perhaps a number, which is promoted otherwise
        parts.append((type(leaf), leaf.dtype, tuple(leaf.shape), leaf.stride(), leaf.storage_offset()))
    try:
        hash(found := tuple(parts))
    except TypeError:
        return None
    return found


@functools.cache
def _is_of_forms(func: Any) -> bool:
    other = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
    return isinstance(func, torch._ops.OpOverload) and func.namespace == "aten" and other.isdisjoint(func.tags)


def _forms_of(result: Any, leaves: list[Any]) -> tuple[_Form | None, ...] | None:
    """The forms of a tensor or of a tuple of several; None for anything else."""
    if not isinstance(result, FakeTensor) and not (type(result) is tuple and len(result) > 1):
        return None
    storages = {leaf.untyped_storage()._cdata: i for i, leaf in enumerate(leaves) if isinstance(leaf, FakeTensor)}
    forms: list[_Form | None] = []
    for made in result if type(result) is tuple else (result,):
        if made is None:
            forms.append(None)
            continue
        same = next((i for i, leaf in enumerate(leaves) if leaf is made), None)
        if same is not None:
            forms.append(_Form(same))
            continue
        if type(made) is not FakeTensor or made.dtype.is_complex or made.fake_device.type != "cpu":
            return None
        where = tuple(made.shape), tuple(made.stride()), int(made.storage_offset()), made.dtype
        storage = made.untyped_storage()
        argument = storages.get(storage._cdata)
        if argument == _NEW or (argument is None and storage.nbytes() != _extent(made)):
            return None  # two results in one memory, or one of a part of its memory
        storages.setdefault(storage._cdata, _NEW)
        forms.append(_Form(argument, *where))
    return tuple(forms)


def _extent(tensor: Tensor) -> int:
    """The bytes from the beginning of its memory to the end of `tensor`."""
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (int(tensor.storage_offset()) + last + 1) * tensor.itemsize if tensor.numel() else 0


def _flat(value: Any, *, marked: bool = False) -> list[Any]:
    """The leaves of an operator's arguments or results, which lie in lists, tuples and dicts alone; with marks for
    these, if that is wanted.
    """
    found: list[Any] = []
    _collect(value, found, marked)
    return found


def _collect(value: Any, found: list[Any], marked: bool) -> None:
    if not isinstance(value, _CONTAINERS):
        found.append(value)
        return
    if marked:
        found.append((type(value), len(value)))
    if isinstance(value, dict):
        if marked:
            found += value
        value = value.values()
    for item in value:
        if isinstance(item, _CONTAINERS):
            _collect(item, found, marked)
        else:
            found.append(item)


_CONTAINERS = (list, tuple, dict)

_MOST = 10_000

_LARGE = 1 << 16
"""The bytes from which on the hash of contents is kept."""

_NEW = -1
"""In place of the argument whose memory a result lies in."""

_COPIES = frozenset({torch.ops.aten.clone.default, torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default})

_FACTS = frozenset({torch.ops.aten.sym_size.default, torch.ops.aten.is_same_size.default})


def _hash(*parts: object) -> str:
    return hashlib.blake2b(repr(parts).encode(), digest_size=12).hexdigest()


def _is_whole(tensor: Tensor) -> bool:
    """Return whether `tensor` is all of its storage, in order."""
    return tensor.is_contiguous() and tensor.nbytes == tensor.untyped_storage().nbytes()


def _contents(tensor: Tensor) -> str:
    if not is_dense(tensor):
        return repr(tensor)
    return hashlib.blake2b(_bytes(tensor), digest_size=12).hexdigest()


def _bytes(tensor: Tensor) -> memoryview:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return plain.view(torch.uint8).numpy().data


@functools.cache
def _writing(func: Any) -> tuple[tuple[int, str], ...]:
    found = enumerate(func._schema.arguments)
    return tuple((i, a.name) for i, a in found if a.alias_info is not None and a.alias_info.is_write)


def _written(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """The arguments that `func` writes into."""
    return [args[i] if i < len(args) else kwargs[name] for i, name in _writing(func) if i < len(args) or name in kwargs]


def _draws(func: Any, args: Any, kwargs: Any) -> bool:
    """Return whether `func` draws random numbers: not as an attention without dropout."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    for i, argument in enumerate(func._schema.arguments):
        if argument.name in ("dropout_p", "p", "dropout"):
            value = args[i] if i < len(args) else kwargs.get(argument.name, argument.default_value)
            return bool(value)
    return True


def _draw() -> int:
    """Advance torch's generator, so that drawing is seen; returns where it was."""
    generator = torch.default_generator
    seed = generator.initial_seed()
    generator.manual_seed((seed * 6364136223846793005 + 1442695040888963407) % (1 << 63))
    return seed
