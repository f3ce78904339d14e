"""A taskset of verifiers v1 for tests, as a package of its hub would define it: sums, with a tool or without."""

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

    @vf.stop
    async def gave_up(self, trace: vf.Trace) -> bool:
        return trace.last_reply == "stop"


class Calculator(vf.Toolset[vf.SharedToolsetConfig]):
    @vf.tool
    async def add(self, a: int, b: int) -> str:
        """Add two numbers."""
        return str(a + b)


class SumConfig(vf.TasksetConfig):
    size: int = 20
    calculator: bool = False


class Sums(vf.Taskset[SumTask, SumConfig]):
    def load(self):
        for number in range(self.config.size):
            data = SumData(prompt=f"{number} + 1 = ?", answer=str(number + 1), system_prompt="Add up.")
            yield SumTask(data, self.config.task)

    @classmethod
    def toolsets(cls, config):
        return [Calculator(vf.SharedToolsetConfig())] if config.calculator else []


__all__ = ["Sums"]

if __name__ == "__main__":
    Calculator.run()
