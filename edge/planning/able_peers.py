"""The peers that have kernels for every operator of a model, and compute rightly."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

from edge.errors import RequestError
from edge.kernels.attention.tiles import LARGEST_HEAD
from edge.models.spec import FILE_BLOCKS, NIBBLE_KV, ROUNDED_KV, WINDOWED_KV, ModelSpec
from edge.partition import Plan
from edge.protocol.peer_info import PeerInfo
from edge.weights.formats import KvDtype, WeightFormat

_REMEDY = "start it with --backend ort, so that its CPU computes"
_LIBRARY = "install edge-inference[fast] on it, or load the model again"
_OTHER_SOFTWARE = "install another version of what computes there: onnxruntime, or its driver"
_NONE: Mapping[str, str] = MappingProxyType({})


def needs_of(
    spec: ModelSpec, form: WeightFormat, kv_dtype: KvDtype, *, keeps_windows: bool = False
) -> tuple[str, ...]:
    """The features that a peer must have for the model in this format, and for keys and values of
    this type.

    keeps_windows: layers with a sliding window keep the newest tokens only. Raises RequestError for
    codes of latent rows, and for int4 with heads of more than LARGEST_HEAD elements.
    """
    if kv_dtype != "float32" and spec.is_latent:
        raise RequestError(
            f"this model keeps one latent row for all heads of a layer, in float32, and {kv_dtype} "
            "was asked for",
            remedy="leave kv_dtype out: such a row takes less than codes of each head's keys and "
            "values",
        )
    if kv_dtype == "int4" and any(
        each.head_size > LARGEST_HEAD for each in spec.attentions.values()
    ):
        raise RequestError(
            "keys and values of heads as wide as this model's are not computed in int4",
            remedy="ask for int8",
        )
    rounded: tuple[str, ...] = () if kv_dtype == "float32" else (ROUNDED_KV,)
    rounded += (NIBBLE_KV,) if kv_dtype == "int4" else ()
    return (*spec.needs, *form.needs, *rounded, *((WINDOWED_KV,) if keeps_windows else ()))


def able_peers(
    peers: Sequence[PeerInfo], needs: Collection[str], wrong: Mapping[str, str] = _NONE
) -> tuple[list[PeerInfo], list[str]]:
    """The peers that can compute the model, and a sentence for each other peer.

    needs: as `needs_of` gives them. wrong: what is wrong with those (by id) that did not prove
    their arithmetic.
    """
    able, sentences = [], []
    for peer in peers:
        if (found := _unable(peer, needs, wrong)) is not None:
            reason, remedy = found
            sentences.append(f"{peer.name} is not used: {reason}; {remedy}")
        else:
            able.append(peer)
    return able, sentences


def some_able_peers(
    peers: Sequence[PeerInfo],
    needs: Collection[str],
    plan: object,
    wrong: Mapping[str, str] = _NONE,
) -> tuple[list[PeerInfo], list[str]]:
    """Like `able_peers`. Raises RequestError where no peer can compute the model, or where a plan
    by hand uses one that cannot."""
    able, sentences = able_peers(peers, needs, wrong)
    if sentences and not able:
        raise RequestError(f"no peer can compute this model: {'; '.join(sentences)}")
    if isinstance(plan, Plan):
        for peer in peers:
            found = _unable(peer, needs, wrong)
            if found is not None and {peer.id, peer.name} & set(plan.devices):
                reason, remedy = found
                raise RequestError(
                    f"the plan by hand gives layers to {peer.name}: {reason}", remedy=remedy
                )
    return able, sentences


def _unable(
    peer: PeerInfo, needs: Collection[str], wrong: Mapping[str, str]
) -> tuple[str, str] | None:
    """Why the peer cannot compute the model, and the remedy; None: it can."""
    if missing := peer.lacking(needs):
        kernel = (
            f"its back end {peer.backend} has no kernel for {', '.join(missing)}, which this model "
            "needs"
        )
        return kernel, _LIBRARY if {FILE_BLOCKS, NIBBLE_KV}.issuperset(missing) else _REMEDY
    return (wrong[peer.id], _OTHER_SOFTWARE) if peer.id in wrong else None
