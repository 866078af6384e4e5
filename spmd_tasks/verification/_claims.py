"""The claims: for each its name, what it says, and the cases that an experiment has."""

from collections.abc import Callable, Iterator, Mapping
import dataclasses

from spmd_tasks.verification._bench import Bench
from spmd_tasks.verification._cases import Case
from spmd_tasks.verification._decode_claim import decode_cases
from spmd_tasks.verification._mesh_claims import mesh_cases
from spmd_tasks.verification._precision_claim import precision_cases
from spmd_tasks.verification._restart_claim import restart_cases
from spmd_tasks.verification._run_claims import checkpoint_cases, eval_cases
from spmd_tasks.verification._stack_claims import microbatch_cases, pipeline_cases, remat_cases, scan_cases


@dataclasses.dataclass(frozen=True, kw_only=True)
class Claim:
  """A sentence about numbers, and a function (bench, how many random cases more) that yields its cases."""

  sentence: str
  cases: Callable[[Bench, int], Iterator[Case]]


CLAIMS: Mapping[str, Claim] = {
  'mesh': Claim(sentence='every mesh gives the numbers of one device, padded or not', cases=mesh_cases),
  'pipeline': Claim(sentence='a pipeline of any schedule gives those of layers in sequence', cases=pipeline_cases),
  'microbatches': Claim(sentence='microbatches of the learner give those of the full batch', cases=microbatch_cases),
  'remat': Claim(sentence='rematerialisation changes no number', cases=remat_cases),
  'scan': Claim(sentence='layers in a loop and unrolled give the same', cases=scan_cases),
  'eval': Claim(sentence='evaluation gives the same on every mesh', cases=eval_cases),
  'decode': Claim(sentence='decoding with a cache gives what a full forward pass does', cases=decode_cases),
  'bfloat16': Claim(sentence='bfloat16 is as near float32 as its roundings let expect', cases=precision_cases),
  'checkpoint': Claim(sentence='saved, restored on another mesh and trained on: the same', cases=checkpoint_cases),
  'restart': Claim(sentence='killed and started again: every bit of an undisturbed run', cases=restart_cases),
}
