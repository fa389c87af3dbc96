"""Gradients of objectives with respect to rows of the embedding table, and relevance by other rules.

Inputs run in batches under a token budget, after the clean prefix, halved when memory runs out. One forward pass serves
all targets; each target then has a backward pass of its own. Only the inputs get gradients: no parameter's gradient is
computed, and nothing is kept for one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from noiser.engine.perturbation import Interpolate, Perturbation
from noiser.engine.plan import Batch
from noiser.engine.readouts import log_of
from noiser.engine.requests import (
    Gradients,
    GradientTable,
    Integrals,
    ObjectiveName,
    PathIntegrals,
    Relevance,
    RelevanceTable,
)
from noiser.engine.runs import QueryRun
from noiser.errors import ModelError, NumericalError, ParameterError
from noiser.model.attention import eager_attention
from noiser.model.clean import Passes
from noiser.model.language_model import LanguageModel, check_finite
from noiser.model.memory import is_out_of_memory
from noiser.model.products import fast_products

COPIES = 4
"""Activations are kept for the backward pass: a token takes about this many times the memory of a plain forward. On a
CPU it is not memory that limits batches, and a backward pass gains from large ones."""


def objective(
    logits: Float[Tensor, "samples tokens vocab"], target: Sequence[int], foil: int | None, name: ObjectiveName
) -> Float[Tensor, " samples"]:
    """Over a target's tokens the geometric mean of p, or the sum of log p or of the logits; less the foil's."""

    def of_tokens(ids: Sequence[int]) -> Float[Tensor, " samples"]:
        values = logits if name == "logit" else logits.log_softmax(-1)
        tokens = values[:, list(range(len(ids))), list(ids)]
        return tokens.mean(-1).exp() if name == "prob" else tokens.sum(-1)

    return of_tokens(target) - (0 if foil is None else of_tokens([foil]))


class _Part(NamedTuple):
    """What one batch tells about samples `first` to `last` of one perturbation, and one target.

    `gradients` [samples, positions, dim] are with respect to the perturbed rows of the embedding table, float32; zero
    at positions after the target's last row, and for a sequence whose gradients are not wanted.
    """

    perturbation: int
    first: int
    last: int
    target: int
    values: Float[Tensor, " samples"]
    gradients: Float[Tensor, "samples positions dim"]


def path_integrals(session: QueryRun, request: PathIntegrals) -> Passes[Integrals]:
    """Answers `PathIntegrals`; the clean input runs with the paths if nothing has run it yet."""
    paths, query, rows = list(request.paths), session.query, session.embeddings
    yield from session.prepare_prefix(paths)
    if session.known_clean is None and not any(path.is_clean and path.targets is None for path in paths):
        paths.append(Interpolate((len(rows) - 1,), weights=None))
    count = len(query.target_spans)
    contributions = torch.zeros(count, *rows.shape, device=rows.device, dtype=torch.float32)
    sums = torch.zeros(len(request.paths), count, len(rows), device=rows.device, dtype=torch.float32)
    values = [torch.full((path.samples, count), torch.nan, dtype=torch.float32) for path in request.paths]
    slopes: dict[tuple[int, int], Tensor] = {}
    for part in _parts(session, paths, request.objective, [path.weights is not None for path in paths]):
        if part.perturbation >= len(request.paths):
            continue
        path, here = paths[part.perturbation], slice(part.first, part.last)
        values[part.perturbation][here, part.target] = part.values.cpu()
        if path.weights is None:
            continue
        weights = torch.tensor(path.weights[here], dtype=torch.float32).to(part.gradients)
        slope = torch.einsum("s,spd->pd", weights, part.gradients)
        key = (part.perturbation, part.target)
        slopes[key] = slopes[key] + slope if key in slopes else slope
    for (index, target), slope in slopes.items():
        path = paths[index]
        at = session.at(path.positions)
        product = slope * path.direction(rows[at], session.baseline)
        contributions[target, at] += product
        sums[index, target, at] = product.sum(-1)
    clean = yield from session.clean()
    logits = log_of(clean.probabilities)
    at_rest = [
        _objective_of(session, g, request.objective)(logits[list(span)][None])
        for g, span in enumerate(query.target_spans)
    ]
    return Integrals(contributions=contributions, sums=sums.cpu(), values=tuple(values), clean=torch.cat(at_rest).cpu())


def point_gradients(session: QueryRun, request: Gradients) -> Passes[GradientTable]:
    """Answers `Gradients`.

    Raises:
        ParameterError: the perturbation deletes or hides tokens.
    """
    point, targets = request.point, session.targets_of(request.point)
    if point.deleted or point.hidden:
        raise ParameterError(
            f"The perturbation {'hides' if point.hidden else 'deletes'} {len(point.positions)} tokens, which have no "
            "gradient; expected one that changes their embeddings. Ask for `Effects` or `Values` of it."
        )
    yield from session.prepare_prefix([point])
    rows = session.embeddings
    values = torch.zeros(point.samples, len(targets), device=rows.device, dtype=torch.float32)
    slopes = torch.zeros(
        len(targets), point.samples, len(point.positions), rows.shape[-1], device=rows.device, dtype=torch.float32
    )
    for part in _parts(session, [point], request.objective, [True]):
        column = targets.index(part.target)
        values[part.first : part.last, column] = part.values.to(values)
        slopes[column, part.first : part.last] = part.gradients
    return GradientTable(values=values, gradients=slopes)


def _parts(
    session: QueryRun, perturbations: Sequence[Perturbation], name: ObjectiveName, wanted: Sequence[bool]
) -> Iterator[_Part]:
    """Each sample of each perturbation once for each of its targets, in the order in which they get ready.

    Raises:
        NumericalError: a logit or a gradient is NaN or infinite.
        ModelError: memory does not suffice for a single sequence.
    """
    copies = 1 if session.lm.device.type == "cpu" else COPIES
    run = partial(_passes, session, perturbations, name, wanted)
    batches = session.plan(perturbations, range(len(perturbations)), copies=copies)
    backward_passes = len(session.query.target_spans)
    expected = session.counters.token_forwards + sum(batch.tokens for batch in batches) * (1 + backward_passes)
    for batch in batches:
        for part in session.run_directly(batch, run, copies):
            yield part
            session.report(expected)


def _passes(
    session: QueryRun, perturbations: Sequence[Perturbation], name: ObjectiveName, wanted: Sequence[bool], batch: Batch
) -> Iterator[_Part]:
    """One forward pass of a batch, one backward pass for each target, cut into parts."""
    query, lm = session.query, session.lm
    rows = session.batch_rows(batch, perturbations)
    targets = sorted({g for piece in batch.pieces for g in session.targets_of(perturbations[piece.perturbation])})
    with lm.running(gradients=True), frozen_parameters(lm.model), fast_products(lm.model):
        inputs = session.inputs(batch, perturbations).detach().requires_grad_()
        logits = lm.logits(inputs, positions=[row - batch.start for row in rows], prefix=session.prefix(batch))
        check_finite(logits.detach().softmax(-1), lm.dtype)
        _hand_over_clean(session, perturbations, batch, rows, logits)
        session.count(batch.tokens, batch.sequences * len(rows), passes=1 + len(targets))
        differentiated = torch.tensor([wanted[p.perturbation] for p in batch.pieces for _ in range(p.samples)])
        for target in targets:
            head = logits[:, [rows.index(row) for row in query.target_rows[target]]]
            of_target, keep = _objective_of(session, target, name), target != targets[-1]
            values, slopes = _backward(head, inputs, of_target, differentiated, keep=keep)
            slopes *= lm.embedding_scale
            yield from _split(batch, perturbations, target, query.target_rows[target][-1], values, slopes)


def _objective_of(session: QueryRun, target: int, name: ObjectiveName) -> Callable[[Tensor], Tensor]:
    """From the logits of a target's tokens to its objective."""
    query, clean = session.query, session.known_clean
    if query.of is not None and clean is not None:
        return lambda logits: clean.objective(logits.log_softmax(-1), target)
    ids = [query.target_ids[token] for token in query.target_spans[target]]
    return partial(objective, target=ids, foil=query.foil_id, name=name)


def _backward(
    logits: Float[Tensor, "batch tokens vocab"],
    inputs: Float[Tensor, "batch length dim"],
    of_target: Callable[[Tensor], Tensor],
    wanted: Bool[Tensor, " batch"],
    *,
    keep: bool,
) -> tuple[Float[Tensor, " batch"], Float[Tensor, "batch length dim"]]:
    """Values of one target, from the logits of its tokens, and its gradients for the sequences whose are wanted.

    The gradient of the objective with respect to the logits may be far below what half precision can hold, so each
    sequence's is brought to size 1 for the way through the model, and the factor put back afterwards.
    """
    head = logits.detach().requires_grad_()
    values = of_target(head)
    if not values.requires_grad:
        raise ParameterError(
            "The function given as of= cannot be differentiated: it does not return what torch computed from its "
            "first argument; expected torch's functions throughout. Or use a method that only predicts, such as "
            "'occlusion'."
        )
    (slope,) = torch.autograd.grad(values.sum(), head)
    slope = slope * wanted.to(slope)[:, None, None]
    size = slope.abs().amax((-1, -2), keepdim=True)
    slope = slope / torch.where(size > 0, size, 1)
    (found,) = torch.autograd.grad(logits, inputs, slope, retain_graph=keep)
    found = found.float() * size.to(found.device)
    if not torch.isfinite(found).all():
        raise NumericalError(
            f"The gradient is NaN or infinite (dtype {str(inputs.dtype).removeprefix('torch.')}); expected finite "
            "numbers. Where the whole input is zero, normalisation layers are too steep: choose another baseline. "
            "In float16, load the model with dtype='float32' or dtype='bfloat16'."
        )
    return values.detach(), found


def _hand_over_clean(
    session: QueryRun,
    perturbations: Sequence[Perturbation],
    batch: Batch,
    rows: Sequence[int],
    logits: Float[Tensor, "batch positions vocab"],
) -> None:
    """Gives the session the clean sequence's logits, where one of the batch is the clean sequence, with all targets."""
    offset = 0
    for piece in batch.pieces:
        perturbation = perturbations[piece.perturbation]
        clean = isinstance(perturbation, Interpolate) and perturbation.is_clean
        if clean and list(rows) == list(session.query.logit_positions):
            session.take_clean(logits[offset])
        offset += piece.samples


def _split(
    batch: Batch,
    perturbations: Sequence[Perturbation],
    target: int,
    row: int,
    values: Float[Tensor, " batch"],
    found: Float[Tensor, "batch length dim"],
) -> Iterator[_Part]:
    offset = 0
    for index, first, last, *_ in batch.pieces:
        samples = slice(offset, offset + last - first)
        offset += last - first
        wanted = perturbations[index].targets
        if wanted is not None and target not in wanted:
            continue
        positions = torch.tensor(perturbations[index].positions, device=found.device)
        inside = (positions <= row) & (positions < batch.stop)
        part = found.new_zeros(last - first, len(positions), found.shape[-1])
        part[:, inside] = found[samples][:, positions[inside] - batch.start]
        yield _Part(index, first, last, target, values[samples], part)


def relevance(session: QueryRun, request: Relevance) -> RelevanceTable:
    """Answers `Relevance`: one forward pass under the rules, and one backward pass for each of the targets.

    Raises:
        NumericalError: a logit or a gradient is NaN or infinite.
        ModelError: memory does not suffice.
    """
    clean = session.embeddings
    inputs = clean[None]
    if request.reference is not None:
        reference = clean.clone()
        at = session.at(request.reference.positions)
        reference[at] = request.reference.rows(clean[at], session.baseline)[0]
        inputs = torch.stack([clean, reference])
    try:
        values, slopes = _ruled_passes(session, request, inputs)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise ModelError(
            f"Not enough memory on {session.lm.device} for a backward pass through {inputs.shape[0]} sequence(s) of "
            f"{inputs.shape[1]} tokens. Shorten the prompt, or load the model in a smaller dtype."
        ) from error
    moved = (clean - inputs[1] if len(inputs) > 1 else clean).cpu().double()  # small differences of large sums
    contributions = torch.stack([(moved * slope.cpu()).sum(-1) for slope in slopes])
    return RelevanceTable(values=torch.stack(values).cpu(), contributions=contributions)


def _ruled_passes(
    session: QueryRun, request: Relevance, rows: Float[Tensor, "batch length dim"]
) -> tuple[list[Float[Tensor, " batch"]], list[Float[Tensor, "length dim"]]]:
    query, lm = session.query, session.lm
    targets = range(len(query.target_spans)) if request.reference is None else session.targets_of(request.reference)
    in_python = _attention_in_python(lm) if request.in_python else contextlib.nullcontext()
    with lm.running(gradients=True), in_python, frozen_parameters(lm.model):
        inputs = (rows * lm.embedding_scale).to(lm.dtype).requires_grad_()
        with request.rules:
            logits = lm.logits(inputs, positions=query.logit_positions)
        check_finite(logits.detach().softmax(-1), lm.dtype)
        session.take_clean(logits[0])
        wanted = torch.arange(len(rows)) == 0
        values: list[Tensor] = []
        slopes: list[Tensor] = []
        for target in targets:
            head, keep = logits[:, list(query.target_spans[target])], target != targets[-1]
            value, slope = _backward(head, inputs, _objective_of(session, target, request.objective), wanted, keep=keep)
            values.append(value)
            slopes.append(slope[0] * lm.embedding_scale)
    session.count(rows.shape[0] * rows.shape[1], rows.shape[0] * len(values), passes=1 + len(values))
    session.report()
    return values, slopes


def _attention_in_python(lm: LanguageModel) -> contextlib.AbstractContextManager[None]:
    """Attention by functions that can be intercepted: eager, where the model has kernels from elsewhere."""
    kind = getattr(lm.model.config, "_attn_implementation", "eager")
    return contextlib.nullcontext() if kind in ("eager", "sdpa") else eager_attention(lm.model)


@contextlib.contextmanager
def frozen_parameters(model: nn.Module) -> Generator[None]:
    """No parameter requires a gradient, so that no activation is kept for one; flags come back afterwards."""
    parameters = [p for p in model.parameters() if p.requires_grad and p.is_leaf]
    for parameter in parameters:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(True)
