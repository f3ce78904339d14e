"""A taskset of verifiers v1 for tests, as a package from its hub would define it: sums, with a calculator or without."""

import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData]):
    @vf.reward
    async def right(self, trace) -> float:
        return float((trace.last_reply or "").strip() == self.data.answer)

    @vf.metric
    async def turns(self, trace) -> float:
        return float(trace.num_turns)


class SumConfig(vf.TasksetConfig):
    size: int = 20


class Sums(vf.Taskset[SumTask, SumConfig]):
    def load(self):
        for number in range(self.config.size):
            data = SumData(prompt=f"{number} + 1 = ?", answer=str(number + 1), system_prompt="Add up.")
            yield SumTask(data, self.config.task)


__all__ = ["Sums"]
