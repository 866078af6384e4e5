"""Plan: what a run will need and cost on a target, found by compiling the very steps that it runs there.

A program that does not fit is an answer, not an error: the compiler's refusal becomes an `OutOfMemory`.
"""

from collections.abc import Iterable, Iterator, Sequence
import contextlib
import dataclasses
import functools
import importlib.metadata
import math
import os
import re
import sys
import tempfile
import time
from typing import Any, NamedTuple

import jax
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh
import numpy as np

from spmd_tasks.decoding import DecodeSteps
from spmd_tasks.errors import JobError, UserError
from spmd_tasks.experiment import Experiment, Job, partition_job
from spmd_tasks.planning.collectives import collectives, slice_of_device
from spmd_tasks.planning.estimate import estimate_step
from spmd_tasks.planning.memory import Buffers, compiler_bytes, memory_parts, read_dump
from spmd_tasks.planning.networks import Networks
from spmd_tasks.planning.pipeline import bubble_fraction, pipeline_report
from spmd_tasks.planning.program import Program, read_program
from spmd_tasks.planning.roofline import Term, at_least, roofline_terms, time_of_step
from spmd_tasks.planning.targets import REMEDIES, Target, has_compiler, target_of
from spmd_tasks.planning.traced_step import trace_step
from spmd_tasks.runtime import PartitionedModel
from spmd_tasks.runtime.compilation import CompiledStep
from spmd_tasks.runtime.flops import model_flops, peak_flops_per_device
from spmd_tasks.runtime.parameter_table import ParameterRow, parameter_rows
from spmd_tasks.runtime.tpu_options import invalid_option_error
from spmd_tasks.sharding import AxisRules
from spmd_tasks.sharding.specs import SplitDim, num_parts, spec_axes

_COMPILER_PACKAGES = {'tpu': 'libtpu', 'gpu': 'jax-cuda13-plugin', 'cpu': 'jaxlib'}
_JAX_SHARE = 0.75  # of a GPU's memory, which JAX takes as it starts: docs.jax.dev, "GPU memory allocation"


Json = dict[str, Any]


def make_plan(job: Job, target: Target, *, steps: Sequence[str] = ('train',), compiles: bool = True) -> Json:
  """Plans a job's steps on a target.

  Args:
    job: the built experiment.
    target: the chips; their number must be that of the mesh.
    steps: names in STEPS, without repetition.
    compiles: whether the steps are compiled for the target, which gives the compiler's memory and collectives. Else the
      train step is only traced (estimate.py).

  Returns:
    plan.json, whose keys docs/planning.md lists.

  Raises:
    UserError: the mesh needs another number of chips, or a split or a step is impossible.
  """
  if unknown := [step for step in steps if step not in STEPS]:
    raise UserError(f'--plan_steps names {unknown[0]!r}, which is no step: choose from {", ".join(STEPS)}.')
  if not steps or len(set(steps)) < len(steps):
    raise UserError(f'--plan_steps {",".join(steps)!r} must name each step once: choose from {", ".join(STEPS)}.')
  check_num_devices(job.experiment, target)
  if not compiles and list(steps) != ['train']:
    raise UserError(
      f'--no_compile estimates the train step, not {", ".join(steps)}: compile these, without --no_compile.'
    )
  mesh_spec = job.experiment.mesh_spec()
  mesh: Any = mesh_spec.build(target.devices()) if compiles else target.abstract_mesh(mesh_spec)
  model = partition_job(job, mesh)
  num_tokens = max(math.prod(spec.shape[:2]) for spec in model.input_layout.spec.values())
  flops = model_flops(model)
  planned = {}
  for step in steps:
    of_train = {'num_tokens': num_tokens, 'model_flops': flops} if step == 'train' else {}
    if not compiles:
      planned[step] = estimate_step(job, model, target, **of_train)
      continue
    compiled, (buffers, program), seconds = compile_step(job, model, step, target)
    refused = compiled if isinstance(compiled, OutOfMemory) else None
    code = 0 if refused else compiled.memory_analysis().generated_code_size_in_bytes
    parts = memory_parts(buffers, program, model, code)
    slice_size = target.num_devices // math.prod(job.experiment.dcn_mesh_shape or (1,))
    planned[step] = _read_program(program, target, mesh, parts, slice_size, refused) | seconds
    terms = _terms(job, model, step, target, planned[step])
    planned[step] |= time_of_step(terms, target.chip, target.num_devices, **of_train)
  dcn_shape = job.experiment.dcn_mesh_shape
  fits = [step['fits'] for step in planned.values()]
  return {
    'experiment': job.name,
    'target': target.name,
    'num_devices': target.num_devices,
    'num_slices': target.num_slices,
    'compiler': target.chip.platform if compiles else None,
    'chip': target.chip.name,
    'chip_figures': dataclasses.asdict(dataclasses.replace(target.chip, gpu_target_config='')),
    'mesh': dict(mesh.shape),
    'dcn_mesh': None if dcn_shape is None else dict(zip(mesh.axis_names, dcn_shape)),
    'num_params': model.total_num_params,  # without padding
    'tokens_per_step': num_tokens,
    'model_flops': flops,  # on all devices; rematerialisation and padding are not counted
    'step': steps[0],
    **planned[steps[0]],
    'fits': False if False in fits else None if None in fits else True,
    'steps': planned,
    'weights': weight_rows(model),
    'pipeline': pipeline_report(job, model),
    'notes': _notes(target, max(step['peak_bytes'] for step in planned.values()), compiles),
    'assumptions': _assumptions(target, model, compiles, planned.values()),
    'versions': _versions(target) if compiles else {'jax': jax.__version__},
  }


def _terms(job: Job, model: PartitionedModel, step: str, target: Target, compiled: Json) -> list[Term]:
  """Returns the terms of a compiled step's time: its own collectives, and the operations of its jaxpr."""
  if target.chip.peak_flops is None:
    return []
  networks = Networks(target, job.experiment.mesh_spec())
  collectives = [
    (each['kind'], tuple(each['axes']), each['count'] * each['bytes_per_device']) for each in compiled['collectives']
  ]
  if step in ('prefill', 'decode'):
    snapshot_bytes = DecodeSteps(model).layout.snapshot_bytes  # which no step reads
    return at_least(compiled['argument_bytes'] - snapshot_bytes, collectives, target.chip, networks)
  traced = model.train_step if step == 'train' else _eval_step(job, model)
  return roofline_terms(
    trace_step(model, traced), target.chip, networks, collectives, bubble=bubble_fraction(job, model)
  )


def _assumptions(target: Target, model: PartitionedModel, compiles: bool, steps: Iterable[Json]) -> list[str]:
  """Returns what a plan rests on, a sentence each."""
  chip = target.chip
  lines = []
  if chip.peak_flops is None:
    lines.append(f'No published figures of {chip.name} are used: there is no time.')
  elif model.tpu_options and chip.platform == 'tpu' and compiles:
    options = ', '.join(f'{name}={value}' for name, value in model.tpu_options.items())
    lines.append(f'The train step is compiled with tpu_options of the experiment: {options}.')
  if any(term['name'] == 'experts' for step in steps for term in step.get('terms', ())):
    lines.append(
      'Routing is balanced: if the busiest device computes 1.2 times the mean number of rows, experts take 20% longer.'
    )
  return lines


def plan_compiled(compiled: Any, target: Target, *, mesh: Mesh | None = None) -> Json:
  """Reads what memory any compiled program needs and what it communicates, whoever wrote it.

  Args:
    compiled: jax.stages.Compiled, compiled for `target.devices()`.
    target: the chips.
    mesh: of the program; default: that of its first argument.

  Returns:
    the keys of plan.json that a step has, without those that need the model: bytes are one device's.

  Raises:
    UserError: no argument has a mesh, and none is given, or its devices are not the target's.
  """
  shardings = jax.tree.leaves(compiled.input_shardings)
  found = (each.mesh for each in shardings if isinstance(each, jax.sharding.NamedSharding))
  mesh = mesh or next((each for each in found if isinstance(each, Mesh)), None)
  if mesh is None:
    raise UserError('no argument of the program is split over a mesh: give plan_compiled the mesh of its devices.')
  kind = mesh.devices.flat[0].device_kind
  if peak_flops_per_device(kind) != target.chip.peak_flops:
    raise UserError(f'the program was compiled for {kind!r}, not for {target.name}: give the target of its devices.')
  analysis = compiled.memory_analysis()
  parts = {
    name: getattr(analysis, f'{name.removesuffix("_bytes")}_size_in_bytes') for name in ('argument_bytes', 'temp_bytes')
  }
  parts['peak_bytes'] = compiler_bytes(analysis)
  return _read_program(read_program(compiled), target, mesh, parts, target.num_devices)


def _read_program(
  program: Program, target: Target, mesh: Mesh, parts: Json, slice_size: int, refused: 'OutOfMemory | None' = None
) -> Json:
  slice_of = slice_of_device if target.chip.platform != 'cpu' else lambda device: device.id // slice_size
  hbm_bytes = refused.available_bytes if refused else target.chip.hbm_bytes
  is_checked = target.chip.platform == 'tpu'  # their compiler refuses what does not fit
  return {
    'fits': False if refused else None if hbm_bytes is None else is_checked or parts['peak_bytes'] <= hbm_bytes,
    'hbm_bytes': hbm_bytes,
    'out_of_memory': refused and refused._asdict(),
    **parts,
    'collectives': [dataclasses.asdict(each) for each in collectives(program, mesh, slice_of)],
  }


def _notes(target: Target, needed: int, compiles: bool) -> list[str]:
  notes, platform, available = [], target.chip.platform, target.chip.hbm_bytes
  if not compiles:
    missing = f'because the compiler for {target.name} is not installed ({REMEDIES.get(platform)})'
    notes.append(
      f'Nothing was compiled, {"as --no_compile asks" if has_compiler(platform) else missing}: memory is estimated, '
      "within 10% of the compiler's for most dense models and 15% with experts."
    )
  if platform == 'gpu' and available and _JAX_SHARE * available < needed <= available:
    notes.append(
      f"JAX takes {_JAX_SHARE:.0%} of a GPU's memory and this needs {needed / available:.0%}: run it with the "
      'environment variable XLA_CLIENT_MEM_FRACTION=0.95.'
    )
  return notes


def mesh_devices(experiment: Experiment) -> int | None:
  """Returns the number of devices that the experiment's mesh needs; None where a size is -1 (all that are left)."""
  if -1 in experiment.ici_mesh_shape:
    return None
  return math.prod(experiment.ici_mesh_shape) * math.prod(experiment.dcn_mesh_shape or (1,))


def check_num_devices(experiment: Experiment, target: Target) -> None:
  """Raises a UserError if the target has not the chips, or not the slices, that the mesh is for."""
  num_slices = math.prod(experiment.dcn_mesh_shape or (1,))
  wanted = mesh_devices(experiment) or target.num_devices
  mesh = f'ici_mesh_shape {experiment.ici_mesh_shape}'
  if experiment.dcn_mesh_shape is not None:
    mesh += f' x dcn_mesh_shape {experiment.dcn_mesh_shape}'
  other = target_of(target.chip, wanted, num_slices)
  remedy = f'take --target {other!r}, or ' if other else ''
  if wanted != target.num_devices:
    raise UserError(
      f'target {target.name!r} has {target.num_devices:,} chips but {mesh} needs {wanted:,}: {remedy}set '
      f'--ici_mesh_shape to {len(experiment.ici_mesh_shape)} sizes whose product is {target.num_devices // num_slices} '
      '(one may be -1).'
    )
  if target.chip.platform == 'tpu' and num_slices != target.num_slices:
    raise UserError(
      f'target {target.name!r} has {target.num_slices} slice(s) but {mesh} is for {num_slices}: {remedy}set '
      f'--dcn_mesh_shape to sizes whose product is {target.num_slices}.'
    )


def _versions(target: Target) -> dict[str, str]:
  versions = {'jax': jax.__version__}
  with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # a CUDA plugin of another major version
    package = _COMPILER_PACKAGES[target.chip.platform]
    versions[package] = importlib.metadata.version(package)
  return versions


# --- the layout of each weight ---


def weight_rows(model: PartitionedModel) -> list[dict[str, Any]]:
  """Makes the rows of plan.json, one per weight, the largest per device first; axes of size 1 are not mentioned.

  `split_dims` and `spec` have a list of names per dim, [] for a dim that is not split; `bytes_per_device` are those of
  the weight alone, without optimizer state; `replicated_over` has the mesh axes of more than 1 along which every device
  holds the same; `why` says in sentences why it is replicated or padded.
  """
  sizes = {axis: size for axis, size in model.mesh.shape.items() if size > 1}
  rows = [_explain(row, sizes, dict(model.mesh.shape), model.axis_rules) for row in parameter_rows(model)]
  return sorted(rows, key=lambda row: (-row['bytes_per_device'], row['name']))


def _explain(row: ParameterRow, sizes: dict[str, int], all_sizes: dict[str, int], rules: AxisRules) -> dict[str, Any]:
  axes = spec_axes(row.spec, len(row.shape))
  used = {axis for dim in axes for axis in dim}
  replicated = tuple(axis for axis in sizes if axis not in used)
  reasons = []
  for dim, (true, padded) in enumerate(zip(row.shape, row.padded_shape)):
    if true != padded:
      parts = num_parts(axes[dim], all_sizes)
      reasons.append(
        f'dim {dim} is padded from {true} to {padded}, the next multiple of {parts} ({" x ".join(axes[dim])})'
      )
  if replicated:
    dims = row.split_dims or (None,) * len(row.shape)
    why = [(dim, *_why_not(entry, replicated, axes[dim], used, rules)) for dim, entry in enumerate(dims)]
    reasons.append(f'replicated over {" and ".join(replicated)}; ' + ('; '.join(_group(why)) or 'it is a scalar'))
  shard = math.prod(math.ceil(size / num_parts(axes[dim], all_sizes)) for dim, size in enumerate(row.padded_shape))
  return {
    'name': row.name,
    'shape': list(row.shape),
    'dtype': row.dtype,
    'split_dims': [list(_names(dim)) for dim in row.split_dims or (None,) * len(row.shape)],
    'spec': [list(each) for each in axes],
    'padded_shape': list(row.padded_shape),
    'waste': row.waste,
    'bytes_per_device': shard * np.dtype(row.dtype).itemsize,
    'replicated_over': list(replicated),
    'why': '. '.join(reasons),
  }


def _group(reasons: Sequence[tuple[int, str, str]]) -> list[str]:
  """Joins the dims that have the same reason: (dim, its name, reason) of each."""
  dims_of: dict[str, list[str]] = {}
  for dim, name, reason in reasons:
    dims_of.setdefault(reason, []).append(f'dim {dim}' + (f' ({name})' if name else ''))
  return [f'{" and ".join(dims)}: {reason}' for reason, dims in dims_of.items()]


def _why_not(
  entry: SplitDim, wanted: Sequence[str], got: Sequence[str], used: set[str], rules: AxisRules
) -> tuple[str, str]:
  """Returns the name of a dim and why none of the axes `wanted` splits it."""
  names = _names(entry)
  targets = [_names(axes) for name in names for rule, axes in rules if rule == name]
  asked = [axes for axes in targets if set(axes) & set(wanted)]
  taken = [axes for axes in targets if set(axes) & used and not set(axes) & set(got)]
  if not names:
    reason = 'no name that a rule could split'
  elif asked or taken:
    axes = (asked or taken)[0]
    held = [axis for axis in axes if axis in used]
    reason = f'a rule asks for {" x ".join(axes)}, but {" and ".join(held)} already splits another dim'
  elif got:
    reason = f'split over {" x ".join(got)} alone by the axis rules'
  else:
    reason = 'left whole by the axis rules'
  return ' '.join(names), reason


def _names(entry: SplitDim) -> tuple[str, ...]:
  if isinstance(entry, str):
    return (entry,)
  return () if entry is None or isinstance(entry, int) else tuple(entry)


# --- the programs ---

STEPS = ('train', 'eval', 'prefill', 'decode')
_SIZE = r'([\d.]+)([KMGT]?)i?B?'
_REFUSALS = (
  re.compile(rf'[Uu]sed {_SIZE} of {_SIZE} hbm'),
  re.compile(rf'required for HLO temporaries \({_SIZE}\) exceeds available HBM \({_SIZE}\)'),  # with the arguments
)
_UNITS = {'': 1, 'K': 2**10, 'M': 2**20, 'G': 2**30, 'T': 2**40}


class OutOfMemory(NamedTuple):
  """The compiler's refusal: bytes of one device, and the first line of its own words."""

  needed_bytes: int
  available_bytes: int
  message: str


def compile_step(
  job: Job, model: PartitionedModel, step: str, target: Target
) -> tuple[Any, tuple[Buffers, Program], dict[str, float]]:
  """Lowers and compiles one step of a job.

  Args:
    job, model: the built experiment, and its task partitioned over the target's devices.
    step: a name in STEPS. `prefill` reads the longest chunk that a prompt begins with; `decode` generates one token for
      every slot.
    target: is named in the lines on stderr before and after it.

  Returns:
    (a jax.stages.Compiled or the compiler's OutOfMemory, its buffers and program, trace_seconds and compile_seconds).

  Raises:
    UserError: the task has no such step, its split is impossible, or the compiler knows an option not.
    JobError: the step does not fit, and the compiler has not said what is in the way.
  """
  note = functools.partial(print, f'plan: compiling the {step} step for {target.name}', file=sys.stderr, flush=True)
  note('...')
  start = time.perf_counter()
  quiet = quiet_stderr(target.chip.platform != 'cpu')
  with tempfile.TemporaryDirectory() as folder, _without_compilation_cache(), quiet:
    # A Pallas kernel asks the context's mesh for the kind of GPU it is lowered for; there need not be one here.
    with jax.sharding.use_abstract_mesh(model.mesh.abstract_mesh):
      lowered = _lower(job, model, step)
    traced = time.perf_counter()
    try:
      made = lowered.compile(compiler_options={'xla_dump_to': folder})
    except jax.errors.JaxRuntimeError as error:
      made = read_refusal(str(error))
      if made is None:
        raise invalid_option_error(error) or error from error.__cause__
    compiled = time.perf_counter()
    try:
      dump = read_dump(folder, target.chip.platform)
    except FileNotFoundError:
      if isinstance(made, OutOfMemory):  # before buffers were assigned
        raise JobError(
          f'the {step} step does not fit on {target.name}: plan it with --no_compile. The compiler says: {made.message}'
        ) from None
      raise
  note('needs more memory than there is' if isinstance(made, OutOfMemory) else 'done', f'{compiled - start:.0f} s')
  return made, dump, {'trace_seconds': round(traced - start, 1), 'compile_seconds': round(compiled - traced, 1)}


@contextlib.contextmanager
def _without_compilation_cache() -> Iterator[None]:
  """Has JAX compile what its persistent cache has too: only a compiler writes its buffers."""
  setting = 'jax_enable_compilation_cache'
  is_enabled = getattr(jax.config, setting)
  jax.config.update(setting, False)
  compilation_cache.reset_cache()  # JAX asks for the setting once
  try:
    yield
  finally:
    jax.config.update(setting, is_enabled)
    compilation_cache.reset_cache()


def _lower(job: Job, model: PartitionedModel, step: str) -> Any:
  if step == 'train':
    return model.train_step.lower()
  if step == 'eval':
    return _eval_step(job, model).lower()
  steps = DecodeSteps(model)
  return steps.prefill.lower() if step == 'prefill' else steps.step.lower()


def _eval_step(job: Job, model: PartitionedModel) -> CompiledStep:
  return model.eval_step(next(iter(job.eval_inputs.values()), job.train_input).element_spec())


def read_refusal(message: str) -> OutOfMemory | None:
  """Reads the compiler's out-of-memory error; None if it is another error."""
  if 'RESOURCE_EXHAUSTED' not in message and 'out of memory' not in message.lower():
    return None
  for pattern in _REFUSALS:
    if found := pattern.search(message):
      needed, available = (float(found[i]) * _UNITS[found[i + 1]] for i in (1, 3))
      return OutOfMemory(round(needed), round(available), message.splitlines()[0])
  return None


@contextlib.contextmanager
def quiet_stderr(is_quiet: bool = True) -> Iterator[None]:
  """Keeps what libraries write to file descriptor 2; an exception gets the last lines of it as a note."""
  if not is_quiet:
    yield
    return
  sys.stderr.flush()
  saved = os.dup(2)
  with tempfile.TemporaryFile() as kept:
    os.dup2(kept.fileno(), 2)
    try:
      yield
    except Exception as error:
      kept.seek(max(0, kept.seek(0, os.SEEK_END) - 4000))
      if text := kept.read().decode(errors='replace').strip():
        error.add_note(f'The compiler wrote:\n{text}')
      raise
    finally:
      sys.stderr.flush()
      os.dup2(saved, 2)
      os.close(saved)
