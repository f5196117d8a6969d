"""An environment of verifiers, written as its own documentation does: nothing in it knows of sfumato."""

import verifiers.v1 as vf

__all__ = ["SumTaskset"]


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData]):
    @vf.reward(weight=1.0)
    async def correct(self, trace: vf.Trace) -> float:
        return float(self.data.answer in (trace.last_reply or ""))

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply or ""))


class SumConfig(vf.TasksetConfig):
    num_tasks: int = 4


class SumTaskset(vf.Taskset[SumTask, SumConfig]):
    def load(self) -> list[SumTask]:
        rows = [(number, number + 1) for number in range(self.config.num_tasks)]
        return [SumTask(SumData(prompt=f"{a}+{b}?", answer=str(a + b)), self.config.task) for a, b in rows]
