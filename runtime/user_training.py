"""Train a list of modules: the runtime's programs on layers of any kind."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from spipe.errors import SpipeError
from spipe.layer_list import LayerListSpec
from spipe.plan import Plan
from spipe.runtime.checkpoint import Checkpoint, find_checkpoint
from spipe.runtime.hooks import NO_HOOKS, TestHooks
from spipe.runtime.inspection import check_modules
from spipe.runtime.job import Job
from spipe.runtime.launch import RankProcesses
from spipe.runtime.modules import Loss, ModuleSource, is_data_set, require_main_program
from spipe.runtime.tensor_file import TensorWriter
from spipe.runtime.training import Log, RunResult, execute, job_of


def train(
    layers: Sequence[nn.Module],
    loss: Loss,
    data: Any,
    plan: Plan,
    *,
    steps: int,
    output: str | Path,
    validation: Any = None,
    evaluate_every: int | None = None,
    checkpoint_every: int | None = None,
    resume: str | Path | None = None,
    log: Log | None = None,
    ranks: RankProcesses | None = None,
    files: Mapping[str, str] | None = None,
    hooks: TestHooks = NO_HOOKS,
    **options: Any,
) -> RunResult:
    """Train layers with a plan; afterwards they hold the trained values.

    Training is that of ``nn.Sequential(*layers)``: for every microbatch the loss, its gradients accumulated over the
    step's microbatches, their mean, and AdamW on fp32 masters, with the plan's precision for weights and activations.

    Args:
        layers: modules, each of one tensor to one tensor, without shared parameters or buffers that change. Those with
            ``requires_grad`` off are frozen: fetched, never stepped.
        loss: (output of the last layer, target) -> mean loss of the microbatch, a scalar.
        data: a path of tokens or text, or None, as for ``run``; or a function of (step, microbatch) that returns
            (input, target); or a data set with a length whose items are (input, target), taken in an order of its own
            every epoch. Layers, loss and data go to the ranks pickled.
        plan: made for ``describe(layers, loss, data)``.
        steps, output, evaluate_every, resume, log, ranks, files, hooks: as for ``run``.
        validation: data like ``data`` (not a path: that has ``validation_fraction``) for evaluations.
        checkpoint_every: steps between checkpoints; None: only the last step is saved. A checkpoint's
            ``model-*.safetensors`` have the names of ``nn.Sequential(*layers)``.
        options: more of ``run``'s arguments: ``keep``, ``validation_fraction``, ``overwrite``, ``trace_steps``, ...

    Raises:
        SpipeError: before anything is started, if what was given cannot work.
        spipe.runtime.RunFailedError: if a rank fails.
    """
    require_main_program()
    check_modules(layers)
    _check_described(layers, plan)
    is_path = data is None or isinstance(data, str | Path)
    if is_path and validation is not None:
        raise SpipeError("validation is for data sets and functions; with tokens or text give validation_fraction")
    for given in (data, validation):
        if given is not None and not isinstance(given, str | Path):
            is_data_set(given)
    source = ModuleSource.of(layers, loss, None if is_path else (data, validation))
    output = Path(output)
    job = job_of(
        plan,
        steps=steps,
        output=output,
        data=data if is_path else None,
        modules=source,
        has_validation=validation is not None,
        evaluate_every=evaluate_every,
        checkpoint_every=checkpoint_every or steps,
        resume=resume,
        hooks=hooks,
        **options,
    )
    result = execute(job, ranks=ranks, log=log, files=files, before_start=lambda: _write_initial(job, layers))
    _read_trained(find_checkpoint(output), layers)
    return result


def _check_described(layers: Sequence[nn.Module], plan: Plan) -> None:
    model = plan.model
    if not isinstance(model, LayerListSpec):
        raise SpipeError(
            f"the plan is for the built-in model {model.name}; make one for the layers: "
            "make_plan(describe(layers, loss, data), ...)"
        )
    if len(layers) != len(model.layers):
        raise SpipeError(
            f"there are {len(layers)} layers, the plan has {len(model.layers)}; describe them and plan again"
        )
    for i, (layer, spec) in enumerate(zip(layers, model.layers, strict=True)):
        shapes = {name: tuple(parameter.shape) for name, parameter in layer.named_parameters()}
        frozen = {name for name, parameter in layer.named_parameters() if not parameter.requires_grad}
        if shapes != spec.parameters or frozen != set(spec.frozen):
            raise SpipeError(
                f"layer {i} ({type(layer).__name__}): parameters {_listed(shapes, frozen)}, in the plan "
                f"{_listed(spec.parameters, set(spec.frozen))}; describe the layers and plan again"
            )


def _listed(shapes: Mapping[str, tuple[int, ...]], frozen: set[str]) -> str:
    words = [f"{name} {list(shape)}{' (frozen)' if name in frozen else ''}" for name, shape in shapes.items()]
    return ", ".join(words) or "none"


def _named(layers: Sequence[nn.Module]) -> dict[str, nn.Parameter]:
    return {f"{i}.{name}": p for i, layer in enumerate(layers) for name, p in layer.named_parameters()}


def _write_initial(job: Job, layers: Sequence[nn.Module]) -> None:
    """What training starts from, in a file that every rank reads its part of."""
    if job.resume is not None:
        return
    tensors = {name: p.detach() for name, p in _named(layers).items()}
    with TensorWriter(job.initial_file, {name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()}) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor.cpu().contiguous())


def _read_trained(checkpoint: Path, layers: Sequence[nn.Module]) -> None:
    files = Checkpoint.load(checkpoint).files()
    with torch.no_grad():
        for name, parameter in _named(layers).items():
            if (key := f"master.{name}") in files:
                value = torch.empty(parameter.shape, dtype=torch.float32)
                files[key].read_into(key, value)
                parameter.copy_(value)
