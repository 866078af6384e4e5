"""Language models other than the common transformer: GLaM, LSTMs, state spaces, and training with quantized weights."""

from praxis import base_model, layers, pax_fiddle, py_utils
from praxis.layers import frnn, glam, rnn_cell, ssm_transformers
from praxis.layers.quantization import quantization_hparams, quantize

from pax_cases import transformers

NestedMap = py_utils.NestedMap


class Glam(transformers.SmallLm):
  """GLaM: gated layers, relative bias, a loss on the logits' size; every second layer has experts."""

  NUM_LAYERS = 4
  OPTIONS = dict(moe=True, e_dim=4, capacity_factor=1.25, num_groups=2, moe_load_balance_loss_weight=0.02)

  def change(self, task, lm):
    own = glam.GlamUniTransformerLmHParams(
      vocab_size=self.VOCAB_SIZE,
      model_dim=self.MODEL_DIMS,
      ff_dim=self.HIDDEN_DIMS,
      attention_num_heads=self.NUM_HEADS,
      attention_key_value_dim=8,
      num_transformer_layers=self.NUM_LAYERS,
      **self.OPTIONS,
    )
    task.model.lm_tpl = pax_fiddle.get_callable(own).set_sharding_params_v1(
      own,
      replica_axis='replica',
      data_axis='data',
      mdl_axis='mdl',
      ici_mesh_shape=self.ICI_MESH_SHAPE,
      dcn_mesh_shape=self.DCN_MESH_SHAPE,
      mesh_axis_names=self.MESH_AXIS_NAMES,
      training_optimized=True,
    )


class GlamExpertChoice(Glam):
  """Experts, narrower than the other layers, choose their tokens."""

  OPTIONS = dict(
    moe=True, e_dim=4, capacity_factor=2.0, num_groups=2, moe_gating_func='expert_choice', moe_hidden_dim=20
  )


class LstmModel(base_model.BaseModel):
  """Two layers of LSTM cells between an embedding and a softmax."""

  vocab_size: int = 0
  dims: int = 0
  cell: type = rnn_cell.LstmCellSimple

  def setup(self):
    self.create_child(
      'embedding', pax_fiddle.Config(layers.Embedding, num_classes=self.vocab_size, input_dims=self.dims)
    )
    cell = pax_fiddle.Config(self.cell, num_input_nodes=self.dims, num_output_nodes=self.dims)
    layer = pax_fiddle.Config(frnn.LstmFrnn, cell_tpl=cell)
    stack = pax_fiddle.Config(
      frnn.StackFrnn, frnn_tpl=layer, num_layers=2, num_input_nodes=self.dims, num_output_nodes=self.dims
    )
    self.create_child('stack', stack)
    softmax = pax_fiddle.Config(layers.FullSoftmax, input_dims=self.dims, num_classes=self.vocab_size)
    self.create_child('softmax', softmax)

  def compute_predictions(self, input_batch):
    x = self.embedding(input_batch.ids)
    x, _ = self.stack(NestedMap(act=x, padding=input_batch.paddings[:, :, None]))
    return self.softmax(x, input_batch.weights[:, :, None], class_ids=input_batch.labels[:, :, None])

  def compute_loss(self, predictions, input_batch):
    weight = predictions.total_weight
    return NestedMap(total_loss=(predictions.avg_xent, weight)), NestedMap(xent=predictions.per_example_xent)


class Lstm(transformers.SmallLm):
  """A language model of LSTM cells."""

  CELL = rnn_cell.LstmCellSimple

  def change(self, task, lm):
    task.model = pax_fiddle.Config(
      LstmModel, name='lstm', vocab_size=self.VOCAB_SIZE, dims=self.MODEL_DIMS, cell=self.CELL
    )
    task.model.mesh_axis_names = self.MESH_AXIS_NAMES
    task.model.ici_mesh_shape = self.ICI_MESH_SHAPE


class StateSpace(transformers.SmallLm):
  """State spaces instead of attention."""

  def change(self, task, lm):
    block = lm.stacked_transformer_tpl.block
    block.transformer_layer_params_tpl = pax_fiddle.Config(
      ssm_transformers.SSMTransformer,
      ssm_dim=self.MODEL_DIMS,
      ssm_nheads=4,
      ssm_l_max=self.SEQ_LEN,
      tr_fflayer_tpl=block.transformer_layer_params_tpl.tr_fflayer_tpl,
    )


class Quantized(transformers.SmallLm):
  """Trains with weights rounded to int8."""

  def change(self, task, lm):
    quantize.set_transformer_quantization(
      lm,
      quantization_type=quantization_hparams.QuantizationType.AQT,
      mode=quantization_hparams.QuantizationMode.TRAINING,
    )
