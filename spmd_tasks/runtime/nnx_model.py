"""Presents a user's NNX module as a Linen module, so that no other part of the project knows of NNX.

    as_linen(functools.partial(Classifier, width=30))     # Classifier is a subclass of nnx.Module

returns an instance of a Linen class that is also called `Classifier`. Its fields are the arguments of the constructor
except `rngs`, and its `__call__` takes the arguments of the NNX module's. `init` constructs the NNX module and returns
its variables by collection: `params`, and others such as `batch_stats`. `apply` gives variables to the module, calls it
in training or evaluation mode, and returns the variables that the call has changed.

`nnx.bridge.ToLinen` does not suffice: it draws new weights in every call, sets no mode, hides the arguments of
`__call__`, needs a key for every stream of random numbers by name, and returns split dims in a box that only it reads.

This module is imported only if `flax.nnx` is.
"""

from collections.abc import Callable
import dataclasses
import functools
import inspect
import types
from typing import Any, ClassVar

from flax import nnx, traverse_util
from flax.core import meta
import flax.linen as nn
import jax
import jax.numpy as jnp

from spmd_tasks.errors import UserError
from spmd_tasks.layers.base import train_flags
from spmd_tasks.runtime.sown_values import warn_of_sown
from spmd_tasks.sharding.weights import WeightBox

_PARAMS = 'params'
_TRAIN = inspect.Parameter('train', inspect.Parameter.KEYWORD_ONLY, default=False)
Path = tuple[str, ...]  # a variable's collection, the attributes, keys and indices of its modules, and its own


def as_linen(model: Any) -> Any:
  """Returns the Linen module for a class of NNX modules or a `functools.partial` of one; `model` itself if it is none.

  Raises a UserError: `model` is an instance of an NNX module, or the constructor does not take its arguments.
  """
  if isinstance(model, nnx.Module):
    name = type(model).__name__
    raise UserError(
      f'model is an instance of {name}, whose weights exist already: pass the class {name}, or '
      f'functools.partial({name}, ...) with its arguments except rngs. The job draws weights by its seed, a shard on '
      'each device.'
    )
  function = model.func if isinstance(model, functools.partial) else model
  if not (isinstance(function, type) and issubclass(function, nnx.Module)):
    return model
  arguments: dict[str, Any] = {}
  try:
    if isinstance(model, functools.partial):
      bound = _constructor(function).bind_partial(*model.args, **model.keywords)
      for name, value in bound.arguments.items():
        is_rest = bound.signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD
        arguments |= value if is_rest else {name: value}
    return _linen_class(function, frozenset(arguments))(**arguments)
  except TypeError as error:
    name = function.__name__
    raise UserError(
      f'model: {name}: {error}: pass functools.partial({name}, ...) with all arguments except rngs.'
    ) from error


@functools.cache
def _linen_class(nnx_class: type[nnx.Module], names: frozenset[str]) -> type['NnxModel']:
  """Returns the Linen class of an NNX class; its fields include `names`, some of which `**kwargs` may take."""
  parameters = dict(_constructor(nnx_class).parameters)
  variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
  rest = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
  takes_rngs = parameters.pop('rngs', None) is not None or rest
  parameters = {name: parameter for name, parameter in parameters.items() if parameter.kind not in variadic}
  annotations = dict.fromkeys(sorted(names), Any) | {name: p.annotation for name, p in parameters.items()}
  for name in annotations:
    if hasattr(NnxModel, name) or name == 'rngs':
      raise UserError(
        f'model: the constructor of {nnx_class.__name__} takes {name}, which is '
        + ('drawn by the job: leave it out.' if name == 'rngs' else 'a name of Linen modules too: rename the argument.')
      )
  attributes = {name: p.default for name, p in parameters.items() if p.default is not p.empty} | {
    '__module__': nnx_class.__module__,
    '__qualname__': nnx_class.__qualname__,
    '__doc__': nnx_class.__doc__,
    '__annotations__': {name: Any if kind is inspect.Parameter.empty else kind for name, kind in annotations.items()},
    '__call__': _call_of(nnx_class),
    '_nnx_class': nnx_class,
    '_takes_rngs': takes_rngs,
  }
  fill = lambda namespace: namespace.update(attributes)
  return types.new_class(nnx_class.__name__, (NnxModel,), {'kw_only': True}, fill)


def _constructor(nnx_class: type[nnx.Module]) -> inspect.Signature:
  """Returns the signature of a class's constructor; `inspect.signature` of the class is its metaclass's."""
  signature = inspect.signature(nnx_class.__init__)
  return signature.replace(parameters=[*signature.parameters.values()][1:])


def _call_of(nnx_class: type[nnx.Module]) -> Callable[..., Any]:
  """Returns the Linen class's `__call__`: the NNX class's, with an argument `train` if it has no flag of that kind."""
  call = getattr(nnx_class, '__call__', None)  # noqa: B004  the class itself is callable
  if not inspect.isfunction(call):
    raise UserError(f'{nnx_class.__name__} has no method __call__ that takes an input: define it.')
  flags = train_flags(train=True)
  parameters = [*inspect.signature(call).parameters.values()]
  takes_flag = any(parameter.name in flags for parameter in parameters)
  if not takes_flag:
    parameters.insert(len(parameters) - (parameters[-1].kind is _TRAIN.VAR_KEYWORD), _TRAIN)
  signature = inspect.signature(call).replace(parameters=parameters)

  @functools.wraps(call)
  def run(self: NnxModel, *arguments: Any, **named: Any) -> Any:
    bound = signature.bind(self, *arguments, **named)
    bound.apply_defaults()
    train = any(bound.arguments.get(name, not value) == value for name, value in flags.items())
    if not takes_flag:
      named.pop('train', None)
    return self._run(train, *arguments, **named)

  run.__signature__ = signature  # type: ignore[attr-defined]
  return run


class NnxModel(nn.Module):
  """Base of the Linen classes that run NNX modules."""

  _nnx_class: ClassVar[type[nnx.Module]]
  _takes_rngs: ClassVar[bool]

  def _run(self, train: bool, *arguments: Any, **named: Any) -> Any:
    assert self.scope is not None
    variables = self.variables
    if self.is_initializing():
      initial = self._construct(self.scope.rngs[_PARAMS].as_jax_rng())  # as nnx.Rngs(seed) draws it
      variables = traverse_util.unflatten_dict(_variables_of(initial, _boxed))
      self._put(variables)
    module = self._with(variables)
    before = _variables_of(module, _value_of)
    module.train() if train else module.eval()
    outputs = module(*arguments, **named)
    after = _variables_of(module, _value_of)
    if self.is_initializing():
      warn_of_sown(type(self).__name__, frozenset(after.keys() - before.keys()))
      return outputs
    for path, value in before.items():
      if path[0] == _PARAMS and after[path] is not value:
        raise UserError(
          f'{type(self).__name__} changes its nnx.Param {"/".join(path[1:])} when it is called, which has no effect: '
          'declare a variable that a step updates without a gradient as another nnx.Variable, such as nnx.BatchStat.'
        )
    changed = [path for path in before if path[0] != _PARAMS and self.is_mutable_collection(path[0])]
    self._put(traverse_util.unflatten_dict({path: after[path] for path in changed}))
    return outputs

  def _with(self, variables: Any) -> nnx.Module:
    """Returns the module with variables, by collection, and with a new key for each of its streams of random numbers.

    Without the rng `dropout`, that is in evaluation, the keys are always the same.
    """
    assert self.scope is not None
    fixed_key = jax.random.key(0, impl='threefry2x32')
    graphs = []

    def split() -> nnx.State:
      graph, state = nnx.split(self._construct(fixed_key))
      graphs.append(graph)
      return state

    def value_of(number: int, path: tuple[Any, ...], leaf: Any) -> Any:
      if isinstance(leaf, nnx.RngKey):
        key = jax.random.fold_in(stream_key, number)
        return jax.random.split(key, leaf.shape) if leaf.shape else key
      if isinstance(leaf, nnx.RngState):
        return jnp.zeros(leaf.shape, leaf.dtype)
      value, names = variables, _path_of(path, leaf)
      for name in names:
        if name not in value:
          raise UserError(f'{type(self).__name__} has the variable {"/".join(names)}, which it was not given.')
        value = value[name]
      return meta.unbox(value)

    stream_key = self.scope.rngs['dropout'].as_jax_rng() if self.has_rng('dropout') else fixed_key
    state = []
    for number, (path, leaf) in enumerate(nnx.to_flat_state(jax.eval_shape(split))):
      value = value_of(number, path, leaf)
      state.append((path, leaf.replace(value) if isinstance(leaf, nnx.Variable) else value))
    return nnx.merge(graphs[0], nnx.from_flat_state(state))

  def _construct(self, key: jax.Array) -> nnx.Module:
    names = [field.name for field in dataclasses.fields(self) if field.name not in ('parent', 'name')]
    arguments = {name: getattr(self, name) for name in names}
    rngs = {'rngs': nnx.Rngs(key)} if self._takes_rngs else {}
    # NNX asks isinstance(x, Union[jax.Array, ...]), which is false for tracers, and takes their arrays for constants.
    nnx.register_data_type(type(key))
    with nnx.use_eager_sharding(False):  # the state is sharded as a whole, by the axis rules
      return self._nnx_class(**arguments, **rngs)

  def _put(self, variables: dict[str, dict[str, Any]]) -> None:
    for collection, tree in variables.items():
      for name, value in tree.items():
        self.put_variable(collection, name, value)


def _variables_of(module: nnx.Module, value_of: Callable[[Any], Any]) -> dict[Path, Any]:
  """Returns the values of a module's variables and of the arrays among its attributes, without random states."""
  flat = nnx.to_flat_state(nnx.state(module))
  return {_path_of(path, leaf): value_of(leaf) for path, leaf in flat if not isinstance(leaf, nnx.RngState)}


def _path_of(path: tuple[Any, ...], leaf: Any) -> Path:
  if isinstance(leaf, nnx.Param):
    collection = _PARAMS
  elif isinstance(leaf, nnx.Variable):
    try:
      collection = nnx.variable_name_from_type(type(leaf))
    except ValueError:  # a class of the user's
      collection = type(leaf).__name__
  else:
    collection = 'constants'
  return (collection, *map(str, path))


def _value_of(leaf: Any) -> Any:
  return leaf.get_raw_value() if isinstance(leaf, nnx.Variable) else leaf


def _boxed(leaf: Any) -> Any:
  """Returns the value of a variable, boxed with its split dims if it has them."""
  value = jax.tree.map(jnp.asarray, _value_of(leaf))
  split_dims = leaf.get_metadata().get('out_sharding') if isinstance(leaf, nnx.Variable) else None
  if split_dims is None:
    return value
  split_dims = tuple(getattr(split_dims, 'spec', split_dims))
  return WeightBox(value, split_dims + (None,) * (value.ndim - len(split_dims)), ())
