"""The worked example of docs/architecture.md from the scheduler down: three requests in, the tensors of two
steps out.
"""

from quire.configs.config import SchedulerConfig
from quire.engine.kv.manager import KVCacheManager
from quire.engine.messages import AddRequest, MemoryPlan, WorkerReady
from quire.engine.scheduler import Scheduler
from quire.worker.messages import StepOutput
from tests.worker.batch.test_input_batch import (
    BLOCK_SIZE,
    GREEDY,
    MAX_MODEL_LEN,
    PROMPTS,
    STEP_1,
    STEP_2,
    Setup,
    _sample,
)


def test_from_the_scheduler_to_the_tensors():
    plan = MemoryPlan("cpu", 0, 0, 0, 0, 0, 0, 0)
    ready = WorkerReady(
        num_blocks=20,
        block_size=BLOCK_SIZE,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=3,
        max_num_batched_tokens=10,
        vocab_size=100,
        default_depth=1,
        plan=plan,
    )
    scheduler = Scheduler(SchedulerConfig(), ready, KVCacheManager(ready.num_blocks, BLOCK_SIZE))
    for i, prompt in enumerate(PROMPTS):
        scheduler.add(AddRequest(str(i), prompt, GREEDY))
    worker = Setup()

    first = scheduler.schedule()
    assert first.input == STEP_1
    batch = worker.prepare(first.input)
    assert batch.positions.tolist() == [0, 1, 2, 0, 1, 0, 1, 2, 3, 4]
    assert batch.attn[0].slot_mapping.tolist() == [2, 3, 4, 6, 7, 8, 9, 10, 11, 12]
    _sample(worker, batch, [13, 22])
    scheduler.update(first, StepOutput(first.input.step, [[13], [22]]))

    second = scheduler.schedule()
    assert second.input == STEP_2
    batch = worker.prepare(second.input)
    assert batch.input_ids.tolist() == [13, 22, 35, 36, 37]
    assert batch.positions.tolist() == [3, 2, 5, 6, 7]
    assert batch.attn[0].slot_mapping.tolist() == [5, 14, 13, 16, 17]
    assert batch.attn[0].query_start_loc.tolist() == [0, 1, 2, 5] and batch.attn[0].seq_lens.tolist() == [4, 3, 8]
    assert batch.sampling.logits_indices.tolist() == [0, 1, 4]
