"""Settings: reads the settings of one Praxis layer, and reports every one that nothing has read.

    settings = Settings(config, 'lm.final_ln_tpl', report)
    epsilon = settings.read('epsilon')
    settings.finish()       # any other setting that is not at its default goes into the report

So a translation cannot overlook a setting: neither one that it forgot, nor one that a newer Praxis adds.
"""

from collections.abc import Iterable
import dataclasses
from typing import Any

# Settings of every Praxis layer that do not change what it computes: names, initial values, where weights lie.
_IRRELEVANT = frozenset(
  {
    'activation_split_dims_mapping',
    'contiguous_submeshes',
    'dcn_mesh_shape',
    'dtype',
    'fprop_dtype',
    'ici_mesh_shape',
    'mesh_axis_names',
    'name',
    'params_init',
    'parent',
    'skip_lp_regularization',
    'weight_init',
    'weight_split_dims_mapping',
  }
)


@dataclasses.dataclass(frozen=True)
class Report:
  """Collects the settings that a translation cannot express.

  Attributes:
    outputs: settings that change what the model computes; with any of these, outputs differ.
    training: settings that change training only, such as dropout of attention weights.
    balance_weights: of the load balance losses of the layers with experts.
  """

  outputs: list[str] = dataclasses.field(default_factory=list)
  training: list[str] = dataclasses.field(default_factory=list)
  balance_weights: list[float] = dataclasses.field(default_factory=list)


class Settings:
  """Reads a Praxis layer's settings by name.

  Attributes:
    path: of the config, for the report.
    report: what cannot be expressed.
  """

  def __init__(self, config: Any, path: str, report: Report):
    """Takes a config, `pax_fiddle.Config(layers.LayerNorm)`, or a layer that was built from one."""
    from praxis import pax_fiddle

    self._config = config
    self.path = path
    self.report = report
    self.layer_class = config.cls if isinstance(config, pax_fiddle.Config) else type(config)
    self._default = pax_fiddle.Config(self.layer_class)
    self._read: set[str] = set()

  @property
  def class_name(self) -> str:
    """The name of a class of Praxis; for any other class the name with its module, which nothing knows."""
    name, module = self.layer_class.__name__, self.layer_class.__module__
    return name if module.startswith('praxis.') else f'{module}.{name}'

  def has(self, name: str) -> bool:
    """Whether the layer has a setting of this name."""
    return any(field.name == name for field in dataclasses.fields(self.layer_class))

  def read(self, name: str) -> Any:
    self._read.add(name)
    return getattr(self._config, name)

  def child(self, name: str) -> 'Settings | None':
    """Returns the settings of a sublayer's template, None if it has none."""
    template = self.read(name)
    return None if template is None else Settings(template, f'{self.path}.{name}', self.report)

  def ignore(self, *names: str) -> None:
    """Names settings that change nothing here, or that the layer around this one overrides."""
    self._read.update(names)

  def training_only(self, *names: str) -> None:
    """Reports the settings that change training, where they are not at their defaults."""
    for name in names:
      if self._differs(name):
        self.report.training.append(self._describe(name))
    self._read.update(names)

  def refuse(self, why: str, *names: str) -> None:
    """Reports that the values of these settings cannot be expressed; of the whole layer, if none is named."""
    what = ', '.join(map(self._describe, names)) or f'{self.path}: {self.class_name}'
    self.report.outputs.append(f'{what}: {why}')
    self._read.update(names)

  def finish(self) -> None:
    """Reports every setting that was not read and is not at its default."""
    for field in dataclasses.fields(self.layer_class):
      if field.name not in self._read | _IRRELEVANT and self._differs(field.name):
        self.report.outputs.append(self._describe(field.name))

  def check_untouched(self, names: Iterable[str] = ()) -> None:
    """`finish` for a template of which only `names` may differ from the defaults."""
    self.ignore(*names)
    self.finish()

  def _differs(self, name: str) -> bool:
    return bool(getattr(self._config, name) != getattr(self._default, name))

  def _describe(self, name: str) -> str:
    value = getattr(self._config, name)
    if hasattr(value, 'cls'):
      value = value.cls.__name__
    return f'{self.path}.{name}={value!r}'
