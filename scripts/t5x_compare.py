"""Compares a case that the real T5X computed with ours: `scripts/t5x_compare CASE_DIR`.

A case is a folder with config.json, batch.npz, initial_weights.npz, initial_logits.npz, initial_grads.json,
curves.json, weights_step_1.npz, final_weights.npz, decoded.json and checkpoint_20 (../shared/t5x/README.md);
missing files are not compared. scripts/run_t5x.py writes such folders with the real T5X. Gradients through queries that
see no key are computed as in T5X; in spmd_tasks they are 0. Each part runs on one device and on 8 (data 4 x model 2),
from the weights and from the checkpoint. The last line has the largest differences, or null:

    logits           largest difference relative to the largest logit
    gradients        the first loss and the norm of each weight's gradient, relative
    steps            one step from each of T5X's states in the folder (initial weights, checkpoint_N): its loss,
                     relative, and each weight after it, relative to its largest entry, if the folder has them
                     (weights_step_1.npz, final_weights.npz, the next checkpoint)
    losses           the losses of all steps from our own states, relative
    final_weights    the weights after the steps and in the checkpoint, relative to their largest entries
    checkpoint       whether our checkpoint of the restored state has T5X's files byte for byte
    scores           the scores of the batch's texts, relative
    greedy, beam     the fraction of equal tokens; for a prefix model, of rows with one prefix
    undetermined     losses, final weights and scores that float32 does not determine to the tolerance: moving our
                     weights by one ulp (before each step) moves them by more than it, or the last bit of a text's
                     logits is more, and T5X's are at most 4 times as far from ours. They are listed as [difference,
                     spread] and left out above; if none is determined, the figure is null and the output says what is
                     compared instead. Also lists elements of the first gradient that are so small compared with
                     their array, [element, root mean square], that rounding decides their sign, which alone
                     decides the first update; a choice of them with the other sign makes everything agree
    unknown          keys of config.json that are not read here; the comparison then only holds with gradients and
                     losses, which would differ if such a key mattered
"""

import argparse
from collections.abc import Collection
import dataclasses
import filecmp
import functools
import itertools
import json
from pathlib import Path
import re
import sys
import tempfile
from typing import Any

from spmd_tasks.distributed.initialization import use_fake_devices

use_fake_devices(8)

import fiddle as fdl  # noqa: E402
from flax import traverse_util  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from spmd_tasks.bridges._lazy_arrays import lazy_array  # noqa: E402
from spmd_tasks.bridges._rules import RuleTable  # noqa: E402
from spmd_tasks.bridges.t5x._gin_translation import ADAFACTOR, NORMALIZATIONS  # noqa: E402
from spmd_tasks.bridges.t5x._seqio import contract_batch  # noqa: E402
from spmd_tasks.bridges.t5x._weights import Layout  # noqa: E402
from spmd_tasks.bridges.t5x.experiments import T5xMoeExperiment  # noqa: E402
from spmd_tasks.bridges.t5x.origin import T5xOrigin, write_state  # noqa: E402
from spmd_tasks.decoding import DecodeSteps, Request  # noqa: E402
from spmd_tasks.decoding.generation import generate, search  # noqa: E402
from spmd_tasks.layers.attention import _plain  # noqa: E402
from spmd_tasks.learning import Adafactor, Learner, ProductOfFactors  # noqa: E402
from spmd_tasks.recipes import EncoderDecoderLanguageModel  # noqa: E402
from spmd_tasks.runtime import DecodeSettings, Task, partition_spmd_model  # noqa: E402
from spmd_tasks.sharding import DEFAULT_AXIS_RULES  # noqa: E402

TOLERANCE = 1e-5
NUM_NUDGED_RUNS = 4
ROUNDED_SHARE = 1e-6  # of the root mean square of an array's gradient: rounding moves its elements by about as much
Element = tuple[str, tuple[int, ...]]  # of a canonical weight
KNOWN_KEYS = (
  *('kind', 'vocab', 'emb', 'heads', 'head_dim', 'mlp', 'enc', 'dec', 'lengths', 'activations', 'tied', 'packed'),
  *('seed', 'case', 'steps', 'learning_rate', 'shims', 'versions', 'z_loss', 'label_smoothing', 'rows'),
  *('loss_normalizing_factor', 'experts', 'top_k', 'group', 'capacity', 'eval_capacity', 'aux', 'router_z'),
  *('batch_prioritized', 'extra_mlp', 'experts_choose', 'scan_layers', 'inputs_bidirectional_attention', *ADAFACTOR),
)
SHARES = ('greedy', 'beam')
NUM_DEVICES = 8  # of every run of T5X, from which the size of the experts' groups follows


class Case:
  """The files of a case, with T5X's settings translated."""

  def __init__(self, directory: Path):
    self.directory = directory
    self.config = json.loads((directory / 'config.json').read_text())
    features = self.npz('batch')
    assert features is not None
    self.features = features
    self.batch = self.batch_of(features)
    self.initial = self.npz('initial_weights')
    self.final = self.npz('final_weights')

  @functools.cached_property
  def layout(self) -> Layout:
    return Layout.of(self.initial or self.final or {}, 'the weights')

  def batch_of(self, features: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the batch with our names."""
    batch = contract_batch(features)
    if self.config.get('inputs_bidirectional_attention') is False:
      batch.pop('prefix_mask', None)
    return batch

  def sparse_every(self, side: str, num_layers: int) -> int:
    """Returns n if every n-th layer of a stack has experts."""
    names = self.initial or self.final or ()
    return num_layers // sum(re.fullmatch(rf'{side}/layers_\d+/mlp/router/.*', name) is not None for name in names)

  def unknown_keys(self) -> list[str]:
    """Returns the keys of config.json that are not read here."""
    return sorted(name for name, value in self.config.items() if value and name not in KNOWN_KEYS)

  def npz(self, name: str) -> dict[str, np.ndarray] | None:
    path = self.directory / f'{name}.npz'
    if not path.exists():
      return None
    with np.load(path) as archive:
      return dict(archive)

  def checkpoints(self) -> dict[int, Path]:
    """Returns the folders of checkpoints by their steps."""
    return {int(path.name.removeprefix('checkpoint_')): path for path in self.directory.glob('checkpoint_*')}

  def json(self, name: str) -> Any:
    path = self.directory / f'{name}.json'
    return json.loads(path.read_text()) if path.exists() else None

  def task(self) -> Task:
    """Returns the model, the loss and the learner."""
    c, names = self.config, set(self.initial or self.final or ())
    gated = any('/wi_0/' in name for name in names)
    activations = c.get('activations', ['gelu', 'linear'] if gated else ['relu'])
    normalizing = c.get('loss_normalizing_factor', 'NUM_REAL_TARGET_TOKENS' if 'experts' in c else None)
    settings = {
      'vocab_size': c['vocab'],
      'model_dims': c['emb'],
      'num_layers': c['dec'],
      'num_encoder_layers': c['enc'] if 'encoder_ids' in self.batch else 0,
      'num_heads': c['heads'],
      'head_dim': c['head_dim'],
      'hidden_dims': c['mlp'],
      'activation': activations[0],
      'is_gated': len(activations) > 1,
      'ties_embedding': not any('logits_dense' in name for name in names),
      'has_bias_per_layer': any('layers_0/relpos_bias' in n or 'coder/encoder/relpos_bias' in n for n in names),
      'z_loss': c.get('z_loss', 0.0),
      'label_smoothing': c.get('label_smoothing', 0.0),
      'normalization': NORMALIZATIONS.get(normalizing, normalizing),
    }
    experiment = EncoderDecoderLanguageModel(**settings)
    if 'experts' in c:
      experiment = T5xMoeExperiment(
        **settings,
        num_experts=c['experts'],
        mixture_every=(self.sparse_every('encoder', c['enc']), self.sparse_every('decoder', c['dec'])),
        num_selected_experts=c['top_k'],
        capacity_factor=c['capacity'],
        eval_capacity_factor=c.get('eval_capacity', 1.0 if c.get('experts_choose') else 2.0),
        max_group_size=c['group'],
        num_groups_multiple_of=c['experts'] * max(1, NUM_DEVICES // c['experts']),
        has_extra_ffn=any('/extra_mlp/' in name for name in names),
        prioritizes_batch=c.get('batch_prioritized', gated),  # Switch's gin files, without gates, turn it off
        load_balance_weight=c['aux'],
        router_z_weight=c.get('router_z', 1e-3),
        experts_choose=c.get('experts_choose', False),
      )
    factors, base, warmup = c['learning_rate'].split(', ')
    schedule = ProductOfFactors(factors=factors, base=float(base), warmup_steps=int(warmup.split()[-1]))
    layout = {'scanned': self.layout.scanned, 'heads_apart': self.layout.heads_apart}
    adafactor = {ours: c[theirs] for theirs, ours in ADAFACTOR.items() if c.get(theirs) is not None}
    decode = DecodeSettings(
      max_len=self.batch['ids'].shape[1] + 1,
      num_slots=8,
      prefill_rows=8,
      eos_ids=(1,),
      min_bucket=1,
      prefill_chunk=16,
      beam_rule='t5x',
      length_penalty=0.6,
    )
    return Task(
      model=fdl.build(experiment.language_model()),
      loss=fdl.build(experiment.loss()),
      learner=Learner(optimizer=Adafactor.as_t5x(learning_rate=schedule, **layout, **adafactor)),
      decode=decode,
    )


class Comparison:
  """Compares the numbers of one mesh with T5X's."""

  def __init__(self, case: Case, num_devices: int, report: dict[str, Any]):
    self.case, self.report = case, report
    devices = np.array(jax.devices()[:num_devices]).reshape(1, -1, 2 if num_devices > 1 else 1)
    mesh = jax.sharding.Mesh(devices, ('replica', 'data', 'mdl'))
    self.spec = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in case.batch.items()}
    self.model = partition_spmd_model(case.task(), mesh, self.spec, axis_rules=DEFAULT_AXIS_RULES)
    self.shapes = traverse_util.flatten_dict(self.model.canonical_state.weights, sep='/')
    shardings = jax.tree.map(lambda x: x.sharding, self.model.padded_state.weights)
    self.nudge = jax.jit(_nudged, out_shardings=shardings)
    self.first_gradients: dict[str, np.ndarray] = {}  # canonical

  def note(self, name: str, difference: float) -> None:
    """Reports the larger of a difference and its earlier value."""
    worse = min if name in (*SHARES, 'checkpoint') else max
    old = self.report.get(name)
    self.report[name] = float(difference if old is None else worse(old, difference))
    print(f'{self.model.mesh.size} devices: {name} {difference:.3g}', flush=True)

  def state_of(self, weights: dict[str, np.ndarray]) -> Any:
    """Returns a new state with T5X's weights."""
    table = self.case.layout.weights(self.shapes)
    table.check(weights, self.shapes)
    canonical = self.model.to_canonical(self.model.init(0))
    tree = traverse_util.unflatten_dict(_convert(table, weights, self.shapes), sep='/')
    return self.model.from_canonical(canonical.replace(weights=tree))

  def theirs(self, tree: Any, names: Any) -> dict[str, np.ndarray]:
    """Returns a tree like the weights with T5X's names."""
    table = self.case.layout.weights(self.shapes).inverse()
    flat = {name: np.asarray(array) for name, array in traverse_util.flatten_dict(tree, sep='/').items()}
    return _convert(table, flat, {name: jax.ShapeDtypeStruct((), 'f4') for name in names})

  def compare_weights(self, state: Any, undetermined: Collection[str] = ()) -> None:
    self.note_determined('final_weights', self.weight_differences(state), undetermined)

  def weight_differences(self, state: Any) -> dict[str, float]:
    final = self.case.final or {}
    ours = self.theirs(self.model.to_canonical(state).weights, final)
    return {n: float(np.abs(ours[n] - x).max() / np.abs(x).max()) for n, x in final.items()}

  def note_determined(self, name: str, differences: dict[str, float], undetermined: Collection[str]) -> None:
    """Reports the largest of the differences that float32 determines, if any."""
    if determined := [d for n, d in differences.items() if n not in undetermined]:
      self.note(name, float(np.max(determined)))
    elif differences:
      print(
        f'{self.model.mesh.size} devices: float32 determines none of the {len(differences)} {name}: the losses that it '
        "determines are compared, and one step from each of T5X's own states that the folder has"
      )

  def compare_steps(self) -> None:
    """Compares one step from each of T5X's states with the state after it."""
    curve, step = self.case.json('curves')['1 device']['curve'], self.model.train_step
    checkpoints = self.case.checkpoints()
    for i, at in enumerate(curve):
      if i not in checkpoints and (i > 0 or self.case.initial is None):
        continue
      state = self.read(checkpoints[i]) if i else self.state_of(self.case.initial or {})
      state, metrics = step(state, step.place(self.case.batch))
      self.note('steps', abs(float(metrics['loss']) / at['loss'] - 1))
      if (want := self.weights_after(i + 1)) is not None:
        ours = self.weights_of(state)
        for name, x in want.items():
          is_signed = np.ones(x.shape, bool)
          if i == 0 and name in self.first_gradients:
            is_signed = ~_is_unsigned(self.first_gradients[name])
          self.note('steps', float(np.abs(np.where(is_signed, ours[name] - x, 0)).max() / np.abs(x).max()))

  def weights_after(self, number: int) -> dict[str, np.ndarray] | None:
    """Returns T5X's weights after a number of steps with our names, if the folder has them."""
    weights = self.case.npz(f'weights_step_{number}')
    if weights is None and number == len(self.case.json('curves')['1 device']['curve']):
      weights = self.case.final
    if weights is not None:
      return _convert(self.case.layout.weights(self.shapes), weights, self.shapes)
    path = self.case.checkpoints().get(number)
    return None if path is None else self.weights_of(self.read(path))

  def read(self, path: Path) -> Any:
    """Returns the state in a checkpoint of T5X."""
    return T5xOrigin(path=str(path)).start(self.model, 0)[0]

  def compare_start(self, state: Any) -> None:
    """Compares initial logits and gradients."""
    task, case = self.model.task, self.case

    def logits_of(variables: Any, batch: Any) -> Any:
      return task.predict(variables, batch)['logits']

    def gradients_of(variables: Any, batch: Any) -> Any:
      def loss(weights: Any) -> Any:
        return task.compute_loss(variables | {'params': weights}, batch, train=True, rng=jax.random.key(0)).loss

      return jax.value_and_grad(loss)(variables['params'])

    if (want := case.npz('initial_logits')) is not None:
      step = self.model.batch_step('logits', self.spec, logits_of)
      got = np.asarray(step(state.variables, step.place(case.batch)))
      self.note('logits', float(np.abs(got - want['logits']).max() / np.abs(want['logits']).max()))
    if (want := case.json('initial_grads')) is not None:
      step = self.model.batch_step('gradients', self.spec, gradients_of)
      loss, gradients = step(state.variables, step.place(case.batch))
      shapes = self.model.canonical_state.weights
      canonical = jax.tree.map(lambda g, c: np.asarray(g).reshape(c.shape), gradients, shapes)
      self.first_gradients = traverse_util.flatten_dict(canonical, sep='/')
      ours = self.theirs(canonical, want['norms'])
      norms = _norms(ours)
      differences = {n: abs(norms[n] / norm - 1) for n, norm in want['norms'].items() if norm}
      differences['first loss'] = abs(float(loss) / want['loss'] - 1)
      spread = dict.fromkeys(differences, 0.0)
      for seed in range(NUM_NUDGED_RUNS if max(differences.values()) > TOLERANCE else 0):
        moved = state.replace(weights=self.nudge(state.weights, jax.random.key(seed)))
        _, gradients = step(moved.variables, step.place(case.batch))
        others = _norms(
          self.theirs(jax.tree.map(lambda g, c: np.asarray(g).reshape(c.shape), gradients, shapes), norms)
        )
        spread = {n: max(old, abs(others[n] / norms[n] - 1)) if n in norms else old for n, old in spread.items()}
      self.note_determined('gradients', differences, self.undetermined(differences, spread))

  def train(self, seed: int | None = None, turned: Collection[Element] = ()) -> tuple[Any, np.ndarray]:
    """Returns the last state and the losses.

    Args:
      seed: each weight moves by one ulp before each step.
      turned: elements whose first update is taken the other way.
    """
    state, step = self.state_of(self.case.initial or {}), self.model.train_step
    first = self.weights_of(state) if turned else {}
    losses = []
    for i in range(len(self.case.json('curves')['1 device']['curve'])):
      if seed is not None:
        state = state.replace(weights=self.nudge(state.weights, jax.random.key(1000 * seed + i)))
      state, metrics = step(state, step.place(self.case.batch))
      losses.append(float(metrics['loss']))
      if turned and i == 0:
        weights = self.weights_of(state)
        for name, index in turned:
          weights[name][index] = 2 * first[name][index] - weights[name][index]
        tree = traverse_util.unflatten_dict(weights, sep='/')
        state = self.model.from_canonical(self.model.to_canonical(state).replace(weights=tree))
    return state, np.array(losses)

  def weights_of(self, state: Any) -> dict[str, np.ndarray]:
    """Returns copies of the canonical weights."""
    weights = traverse_util.flatten_dict(self.model.to_canonical(state).weights, sep='/')
    return {name: np.array(x) for name, x in weights.items()}

  def unsigned_elements(self) -> list[Element]:
    """Returns the elements of the first gradient whose sign rounding decides, the smallest first, three at most."""
    elements = []
    for name, gradient in self.first_gradients.items():
      size = np.sqrt(np.mean(np.square(gradient)))
      elements += [(abs(gradient[index]) / size, name, index) for index in zip(*np.nonzero(_is_unsigned(gradient)))]
    return [(name, index) for _, name, index in sorted(elements)[:3]]

  def train_turned(self, want: np.ndarray) -> tuple[Any, np.ndarray] | None:
    """Trains with the first updates of some `unsigned_elements` negated, until everything agrees; else returns None."""
    elements = self.unsigned_elements()
    for number in range(1, len(elements) + 1):
      for turned in itertools.combinations(elements, number):
        state, losses = self.train(turned=turned)
        if np.max([*np.abs(losses / want - 1), *self.weight_differences(state).values()]) <= TOLERANCE:
          undetermined = self.report.setdefault('undetermined', {}).setdefault(f'{self.model.mesh.size} devices', {})
          for name, index in turned:
            gradient, place = self.first_gradients[name], f'{name}{[*map(int, index)]}'
            undetermined[place] = [float(gradient[index]), float(np.sqrt(np.mean(np.square(gradient))))]
            print(f'{self.model.mesh.size} devices: rounding decides the sign of the first gradient of {place}')
          return state, losses
    return None

  def compare_training(self) -> None:
    """Compares the losses of all steps, and the last weights."""
    state, losses = self.train()
    want = np.array([point['loss'] for point in self.case.json('curves')['1 device']['curve']])
    differences = {f'loss {i}': float(d) for i, d in enumerate(np.abs(losses / want - 1))}
    weights = self.weight_differences(state)
    undetermined: Collection[str] = ()
    holds = np.max([*differences.values(), *weights.values(), 0.0]) <= TOLERANCE
    if not holds and (turned := self.train_turned(want)) is not None:
      state, losses = turned
      differences = {f'loss {i}': float(d) for i, d in enumerate(np.abs(losses / want - 1))}
    elif not holds:
      spread = dict.fromkeys([*differences, *weights], 0.0)
      ours = self.theirs(self.model.to_canonical(state).weights, weights)
      for seed in range(NUM_NUDGED_RUNS):
        other, moved = self.train(seed)
        moved = {f'loss {i}': float(d) for i, d in enumerate(np.abs(moved / losses - 1))}
        arrays = self.theirs(self.model.to_canonical(other).weights, weights)
        moved |= {n: float(np.abs(arrays[n] - x).max() / np.abs(x).max()) for n, x in ours.items()}
        spread = {name: max(old, moved[name]) for name, old in spread.items()}
      undetermined = self.undetermined({**differences, **weights}, spread)
    self.note_determined('losses', differences, undetermined)
    self.compare_weights(state, undetermined)

  def undetermined(self, differences: dict[str, float], spread: dict[str, float]) -> list[str]:
    """Returns and reports differences above the tolerance that rounding explains."""
    names = [n for n, d in differences.items() if TOLERANCE < d <= 4 * spread[n] and spread[n] > TOLERANCE]
    for name in names:
      undetermined = self.report.setdefault('undetermined', {}).setdefault(f'{self.model.mesh.size} devices', {})
      undetermined[name] = [differences[name], spread[name]]
      print(f'{self.model.mesh.size} devices: {name} differs by {differences[name]:.3g}, one ulp moves it by ', end='')
      print(f'{spread[name]:.3g}: float32 does not determine it', flush=True)
    return names

  def compare_checkpoint(self) -> Any:
    """Compares the state in `checkpoint_20`, and our checkpoint of it; returns the state."""
    _, path = max(self.case.checkpoints().items())
    state = self.read(path)
    self.compare_weights(state)
    with tempfile.TemporaryDirectory() as directory:
      layout = Layout.of(self.case.final or {}, str(path))
      written = Path(write_state(directory, self.model.to_canonical(state), layout))
      files = sorted(str(file.relative_to(path)) for file in path.rglob('*') if file.is_file())
      ours = sorted(str(file.relative_to(written)) for file in written.rglob('*') if file.is_file())
      same, _, _ = filecmp.cmpfiles(path, written, files, shallow=False)
      self.note('checkpoint', float(files == ours and len(same) == len(files) and written.name == path.name))
    return state

  def requests(self) -> dict[int, Request]:
    """Returns the prompts of T5X by row: the encoder's texts, or prefixes, which T5X fills up to the row's length.

    Rows of several prefixes are left out: T5X lets the first ones see the later ones, and generates in their places.
    """
    features, width = self.case.features, self.case.batch['ids'].shape[1]
    if 'encoder_input_tokens' in features:
      texts = [tuple(row[row > 0].tolist()) for row in features['encoder_input_tokens']]
      return {i: Request(ids=(0,), encoder_ids=x, max_tokens=width, stop_ids=(1,)) for i, x in enumerate(texts)}
    if 'decoder_causal_attention' not in features:
      return {}
    causal = features['decoder_causal_attention']
    rows = np.flatnonzero((np.diff(causal, axis=1) <= 0).all(axis=1)).tolist()
    prompts = {i: tuple(features['decoder_input_tokens'][i, : causal[i].sum()].tolist()) for i in rows}
    return {i: Request(ids=ids, max_tokens=width - len(ids) + 1, stop_ids=(1,)) for i, ids in prompts.items()}

  def compare_decoding(self, state: Any) -> None:
    """Compares scores, greedy and beam search, of the final weights."""
    want, case = self.case.json('decoded'), self.case
    if want is None:
      return

    def scores_of(variables: Any, batch: Any) -> Any:
      task = self.model.task
      largest = jnp.max(jnp.abs(task.predict(variables, batch)['logits']))
      return -task.compute_loss(variables, batch, train=False).per_example['cross_entropy'], largest

    step = self.model.batch_step('scores', self.spec, scores_of)
    # T5X scored and decoded rows, of packed ones too, as single texts.
    rows = {name: x for name, x in case.features.items() if not name.endswith(('_segment_ids', '_positions'))}
    single = step.place(case.batch | case.batch_of(rows))
    expected = np.array(want['score_batch'])
    scores, largest = map(np.asarray, step(state.variables, single))
    difference = float(np.abs(scores - expected).max() / np.abs(expected).max())
    # A score is a sum over n tokens of differences of numbers as large as the logits, each rounded in its last bit.
    num_tokens = rows['decoder_loss_weights'].sum(axis=1).max()
    spread = float(np.spacing(largest) * np.sqrt(num_tokens) / np.abs(expected).max())
    for seed in range(NUM_NUDGED_RUNS if difference > TOLERANCE else 0):
      moved = state.replace(weights=self.nudge(state.weights, jax.random.key(seed)))
      others = np.asarray(step(moved.variables, single)[0])
      spread = max(spread, float(np.abs(others - scores).max() / np.abs(expected).max()))
    if not self.undetermined({'scores': difference}, {'scores': spread}):
      self.note('scores', difference)
    by_row = self.requests()
    if not by_row or 'greedy' not in want:
      return
    rows, requests = [*by_row], [*by_row.values()]
    greedy = np.array(want['greedy']['tokens'])
    greedy = greedy.reshape(len(expected), -1)[rows]
    ours = np.zeros_like(greedy)
    for i, text in generate(DecodeSteps(self.model), state.variables, requests, decode=lambda ids: ''):
      ours[i, : len(text.ids)] = text.ids
    self.note('greedy', float((ours == greedy).mean()))
    for name, beams in want.items():
      if not name.startswith('beam_'):
        continue
      _, width, _, alpha = name.split('_')
      settings = dataclasses.replace(self.model.task.decode, num_beams=int(width), length_penalty=float(alpha))
      tokens = np.array(beams['tokens'])[rows]
      ours = np.zeros_like(tokens)
      for i, texts in search(DecodeSteps(self.model, settings), state.variables, requests, decode=lambda ids: ''):
        for j, text in enumerate(texts):
          ours[i, -1 - j, : len(text.ids)] = text.ids
          if requests[i].encoder_ids:  # T5X keeps padding tokens that some models draw before a text
            for side in (ours, tokens):
              ids = np.trim_zeros(side[i, -1 - j], 'f')
              side[i, -1 - j] = np.pad(ids, (0, side.shape[-1] - len(ids)))
      self.note('beam', float((ours == tokens).mean()))


def _convert(table: RuleTable, source: dict[str, np.ndarray], target: dict[str, Any]) -> dict[str, np.ndarray]:
  """Returns each weight of the target, in the dtype that it has there."""
  lazy = table.convert_lazily({name: lazy_array(array) for name, array in source.items()}, target)
  return {name: np.asarray(array) for name, array in lazy.items()}


def _norms(arrays: dict[str, np.ndarray]) -> dict[str, float]:
  return {name: float(np.linalg.norm(x.astype(np.float64).ravel())) for name, x in arrays.items()}


def _is_unsigned(gradient: np.ndarray) -> np.ndarray:
  """Returns which elements, of the array's shape, have a sign that rounding decides."""
  sizes = np.abs(gradient)
  return (sizes > 0) & (sizes < ROUNDED_SHARE * np.sqrt(np.mean(np.square(gradient))))


def _nudged(weights: Any, key: Any) -> Any:
  leaves, tree = jax.tree.flatten(weights)
  up = [jax.random.bernoulli(k, 0.5, leaf.shape) for k, leaf in zip(jax.random.split(key, len(leaves)), leaves)]
  return tree.unflatten([jnp.nextafter(leaf, jnp.where(u, jnp.inf, -jnp.inf)) for u, leaf in zip(up, leaves)])


def pass_gradients_as_t5x() -> None:
  """Lets gradients through the logits of queries that see no key, as T5X does.

  Such a query attends evenly whatever its logits are, so that ours are 0. They matter where padding has a part in
  losses, as in those of routers.
  """
  _plain._sees_keys = lambda may_see: True
  print("gradients pass through the logits of queries that see no key, as in T5X; a job's do not")


def main(argv: list[str] | None = None) -> int:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('case', type=Path, metavar='CASE_DIR')
  parser.add_argument('--num_devices', type=int, nargs='+', default=[1, 8], choices=[1, 8], help='run on so many alone')
  args = parser.parse_args(argv)
  case = Case(args.case)
  pass_gradients_as_t5x()
  names = ('logits', 'gradients', 'steps', 'losses', 'final_weights', 'checkpoint', 'scores', *SHARES)
  report: dict[str, Any] = dict.fromkeys(names)
  for num_devices in args.num_devices:
    comparison = Comparison(case, num_devices, report)
    if case.initial is not None:
      comparison.compare_start(comparison.state_of(case.initial))
      if case.json('curves') is not None:
        comparison.compare_steps()
        comparison.compare_training()
    if case.checkpoints():
      comparison.compare_decoding(comparison.compare_checkpoint())
    elif case.final is not None:
      comparison.compare_decoding(comparison.state_of(case.final))
  holds = all(
    value is None or (value == 1 if name in (*SHARES, 'checkpoint') else value <= TOLERANCE)
    for name, value in report.items()
    if name != 'undetermined'
  )
  if unknown := case.unknown_keys():
    print(
      f'config.json has keys that are not read here: {", ".join(unknown)}; where numbers differ, say in task() what '
      'they set'
    )
    report['unknown'], holds = unknown, holds and None not in (report['gradients'], report['losses'])
  print(json.dumps(report))
  return 0 if holds else 1


if __name__ == '__main__':
  sys.exit(main())
