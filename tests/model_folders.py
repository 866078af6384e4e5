"""Hugging Face model folders with small trained tokenizers, as the families have them."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

TEXTS = [
  'the cat sat on the mat and the hat',
  'a dog ate that {"name": "cat", "age": 7}',
  'été 漢字 🙂',
  'def f(x): return x',
]
SPECIAL = ['<pad>', '<s>', '</s>', '<|im_start|>', '<|im_end|>', '[gMASK]']
PREFIXES = {'byte_level': ['<s>'], 'metaspace': ['<s>'], 'no_bos': [], 'two': ['[gMASK]', '<s>']}


def write_tokenizer(folder: Path, kind: str = 'byte_level', **config) -> Path:
  """Writes tokenizer.json and tokenizer_config.json; `kind` is a key of PREFIXES, `config` goes into the latter."""
  folder.mkdir(parents=True, exist_ok=True)
  if kind == 'metaspace':
    tokenizer = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token=None))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend('▁'), normalizers.Replace(' ', '▁')])
    tokenizer.decoder = decoders.Sequence(
      [decoders.Replace('▁', ' '), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(' ', 1, 0)]
    )
    special = [*SPECIAL, *(f'<0x{byte:02X}>' for byte in range(256))]
    alphabet = sorted(set('▁ ' + ''.join(TEXTS[:2] + TEXTS[3:])))
    # Not special, as in sentencepiece's files: they are only the names of bytes.
    trainer = trainers.BpeTrainer(
      vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([text.replace(' ', '▁') for text in (*TEXTS[:2], TEXTS[3])] * 9, trainer)
    saved = json.loads(tokenizer.to_str())
    saved['added_tokens'] = [entry for entry in saved['added_tokens'] if entry['content'] in SPECIAL]
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(saved))
  else:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
      vocab_size=300, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS * 9, trainer)
  tokenizer.add_tokens(['<tool_call>', '</tool_call>'])  # not special: they are part of the text
  prefix = PREFIXES[kind]
  if prefix:
    tokenizer.post_processor = processors.TemplateProcessing(
      single=' '.join([*prefix, '$A']), special_tokens=[(token, tokenizer.token_to_id(token)) for token in prefix]
    )
  tokenizer.save(str(folder / 'tokenizer.json'))
  named = {'bos_token': '<s>', 'eos_token': {'__type': 'AddedToken', 'content': '</s>'}, 'pad_token': '<pad>'}
  backend = {'tokenizer_class': 'PreTrainedTokenizerFast', 'clean_up_tokenization_spaces': False}
  (folder / 'tokenizer_config.json').write_text(json.dumps(named | backend | config))
  return folder


def write_llama(folder: Path, kind: str = 'byte_level', *, dtype=np.float32, **config) -> Path:
  """Writes a small Llama with random weights and the tokenizer of `kind`; `config` goes into generation_config.json."""
  write_tokenizer(folder, kind, chat_template=config.pop('chat_template', None))
  vocab_size, dim, ffn, heads, kv_heads, head_dim = 440, 24, 40, 3, 1, 8
  sizes = {'hidden_size': dim, 'intermediate_size': ffn, 'num_attention_heads': heads, 'num_key_value_heads': kv_heads}
  sizes |= {'num_hidden_layers': 2, 'head_dim': head_dim, 'vocab_size': vocab_size, 'max_position_embeddings': 256}
  llama = {'model_type': 'llama', 'architectures': ['LlamaForCausalLM'], 'rms_norm_eps': 1e-6, 'eos_token_id': 2}
  (folder / 'config.json').write_text(json.dumps(llama | sizes | {'dtype': np.dtype(dtype).name}))
  (folder / 'generation_config.json').write_text(json.dumps(config))
  rng = np.random.default_rng(0)
  layer = {
    'self_attn.q_proj': (heads * head_dim, dim), 'self_attn.k_proj': (kv_heads * head_dim, dim),
    'self_attn.v_proj': (kv_heads * head_dim, dim), 'self_attn.o_proj': (dim, heads * head_dim),
    'mlp.gate_proj': (ffn, dim), 'mlp.up_proj': (ffn, dim), 'mlp.down_proj': (dim, ffn),
  }  # fmt: skip
  shapes = {'model.embed_tokens': (vocab_size, dim), 'lm_head': (vocab_size, dim)}
  shapes |= {f'model.layers.{i}.{name}': shape for i in range(2) for name, shape in layer.items()}
  weights = {f'{name}.weight': rng.normal(0, shape[-1] ** -0.5, shape).astype(dtype) for name, shape in shapes.items()}
  norms = ['model.norm', *(f'model.layers.{i}.{n}_layernorm' for i in range(2) for n in ('input', 'post_attention'))]
  weights |= {f'{name}.weight': np.ones(dim, dtype) for name in norms}
  save_file(weights, folder / 'model.safetensors', metadata={'format': 'pt'})
  return folder
