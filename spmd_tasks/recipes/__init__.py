"""Bases to subclass: whole experiments that lack only sizes, intervals and, where you like, your own data.

from spmd_tasks import register
from spmd_tasks.recipes import DenseLanguageModel

@register
class Narrow(DenseLanguageModel):
'''A narrow byte model.'''

model_dims = 48
"""

from spmd_tasks.recipes.dense import DenseLanguageModel
from spmd_tasks.recipes.mixture_of_experts import MoeLanguageModel
from spmd_tasks.recipes.pipelined import PipelinedLanguageModel
from spmd_tasks.recipes.synthetic import SyntheticLanguageModel

__all__ = ['DenseLanguageModel', 'MoeLanguageModel', 'PipelinedLanguageModel', 'SyntheticLanguageModel']
