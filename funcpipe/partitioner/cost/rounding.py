"""How long functions take to round what they sum in fewer bits, and to read it.

A replica rounds its contribution, adds those that it sums as they come, rounds that sum, and reads the other sums. Most
of this happens while other bytes are on their way. Beyond the transfers, a synchronisation takes the rounding of the
first object, which has to be done before its bytes can go, and in steps that wait for each other, of each of them; the
addition of the last piece, once all replicas' are there; and the reading of the last sum. What runs beside a backward
takes processors from it.

By hand: four replicas sum 120 bytes each in three phases; a byte takes 2 s to round and 1 s to read and add. A split of
30 bytes takes 60 s before it goes. The sum of a split takes 60 s to round this replica's own, 4 * 30 s to add four, and
60 + 30 s to be rounded and read, as others read it; a sum of another replica takes 30 s to read:

>>> rounding = Rounding(encode_s=2, decode_s=1, encode_sum_s=2, decode_sum_s=1, lost=1)
>>> [float(part_s) for part_s in unhidden_s(Sync.THREE_PHASE, 120, 120, 4, (1, 3, 1), rounding)]
[60.0, 270.0, 30.0]

In all, a replica rounds 120 bytes of its own and 30 of a sum, and reads 4 * 30 and 30 + 3 * 30 bytes:

>>> float(all_s(Sync.THREE_PHASE, 120, 120, 4, rounding))
540.0
"""

from typing import Any, NamedTuple

import numpy as np

from funcpipe.core import CodecCost, Sync
from funcpipe.core.choices import members_of_group, tree_depth
from funcpipe.core.stores import GB
from funcpipe.partitioner.cost import Array


class Rounding(NamedTuple):
    """Seconds that a function takes to round, or to read and add, a byte that travels: of contributions, and of sums.

    A computation that runs beside takes `lost` times as long as that longer.
    """

    encode_s: Array | float
    decode_s: Array | float
    encode_sum_s: Array | float
    decode_sum_s: Array | float
    lost: Array | float


def rounding_of(codec: CodecCost | None, *, wire_ratio: float, sums: bool, vcpu: Array | float) -> Rounding | None:
    """The seconds of functions with `vcpu` processors, one of which rounds at a time; None where nothing is rounded.

    Bytes are `wire_ratio` of those of 32-bit numbers. Unless `sums`, what is sent in the end is not rounded.
    """
    if codec is None:
        return None
    byte_s = 1 / (GB * wire_ratio * np.minimum(vcpu, 1.0))
    encode_s, decode_s = codec.encode_s_gb * byte_s, codec.decode_s_gb * byte_s
    return Rounding(encode_s, decode_s, sums * encode_s, sums * decode_s, 1 / np.maximum(vcpu, 1.0))


def addition_s(sync: Sync, piece: Any, sum_bytes: Any, replicas: int, rounding: Rounding, fan_in: int = 0) -> Any:
    """Seconds to sum a piece of all replicas, of all groups of a hierarchy, or of the children in a tree of so large a
    `fan_in`, and to round the sum, as others read it.

    Only in an exchange has a replica's own contribution to it been rounded before.
    """
    own_s = 0.0 if sync is Sync.EXCHANGE else rounding.encode_s * piece
    added = _groups(sync, replicas) if _groups(sync, replicas) > 1 else replicas
    added = 1 + min(fan_in, replicas - 1) if sync is Sync.TREE else added
    return own_s + added * rounding.decode_s * piece + (rounding.encode_sum_s + rounding.decode_sum_s) * sum_bytes


def group_addition_s(sync: Sync, piece: Any, replicas: int, rounding: Rounding, fan_in: int = 0) -> Any:
    """Seconds to sum, over a group of a hierarchy, the pieces of the adder and of those who add alike in other groups;
    or, in a tree, those of the children, below the first replica; 0 in other ways.
    """
    if sync is Sync.TREE:
        return (rounding.encode_s + (1 + min(fan_in, replicas - 1)) * rounding.decode_s) * piece
    groups = _groups(sync, replicas)
    return (groups * rounding.encode_s + replicas * rounding.decode_s) * piece if groups > 1 else 0.0 * piece


def _groups(sync: Sync, replicas: int) -> int:
    return replicas // members_of_group(replicas) if sync is Sync.HIERARCHICAL else 1


def unhidden_s(
    sync: Sync, size: Any, sums: Any, replicas: int, cut: tuple[Any, Any, Any], rounding: Rounding
) -> tuple[Any, Any, Any]:
    """Seconds by which rounding prolongs a synchronisation of `size` bytes whose sums take `sums` bytes: what comes
    before the first bytes, between the last piece and its sum, and after the last bytes.

    `cut` are its rounds, groups of readers and objects of sums.
    """
    rounds, groups, merged = cut
    if sync is Sync.TREE:
        return _unhidden_in_tree_s(size / rounds, sums / rounds, replicas, int(groups), rounding)
    share, far = 1 / np.asarray(rounds) / (replicas if sync.shares_sums else 1), _groups(sync, replicas)
    pieces = 1
    if sync.shares_sums:
        near = replicas // far - 1
        pieces = near if sync is Sync.PIPELINED else far * -(-near // np.minimum(groups, near))
    first_s = rounding.encode_s * pieces * share * size
    read_s = 0.0
    if sync is not Sync.EXCHANGE:
        read_s = rounding.decode_sum_s * sums * share * far * rounds / np.minimum(merged, rounds)
    grouped_s = group_addition_s(sync, share * size, replicas, rounding) + (far - 1) * rounding.encode_s * share * size
    return first_s, grouped_s + addition_s(sync, share * size, share * sums, replicas, rounding), read_s


def _unhidden_in_tree_s(
    piece: Any, sum_bytes: Any, replicas: int, fan_in: int, rounding: Rounding
) -> tuple[Any, Any, Any]:
    """The same, where a leaf puts a piece of a round, and the replicas above it sum and put it, level by level."""
    each_s = group_addition_s(Sync.TREE, piece, replicas, rounding, fan_in) + rounding.encode_s * piece
    added_s = (tree_depth(replicas, fan_in) - 1) * each_s
    added_s = added_s + addition_s(Sync.TREE, piece, sum_bytes, replicas, rounding, fan_in)
    return rounding.encode_s * piece, added_s, rounding.decode_sum_s * sum_bytes


def all_s(sync: Sync, size: Any, sums: Any, replicas: int, rounding: Rounding, fan_in: Any = 0) -> Array:
    """Seconds in which one replica rounds and reads all of a synchronisation, one after the other."""
    if sync is Sync.TREE:
        inner_s = group_addition_s(sync, size, replicas, rounding, int(fan_in)) + rounding.encode_s * size
        return np.asarray(inner_s + rounding.decode_sum_s * sums)
    share = 1 / replicas if sync.shares_sums else 1.0
    sent = 1 - share if sync.shares_sums else float(sync is Sync.EXCHANGE)
    read = 1 - share if sync.shares_sums else 0.0
    found: Array = addition_s(sync, share * size, share * sums, replicas, rounding)
    found = found + group_addition_s(sync, share * size, replicas, rounding)
    return np.asarray(found + sent * rounding.encode_s * size + read * rounding.decode_sum_s * sums)
