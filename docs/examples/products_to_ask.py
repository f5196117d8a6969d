"""An environment of verifiers: products, which the reply may leave to a calculator by writing ``calc(12*34)``."""

import random
import re

import verifiers.v1 as vf

__all__ = ["ProductTaskset"]

CALL = re.compile(r"calc\((\d+)\*(\d+)\)")


class ProductData(vf.TaskData):
    answer: int


class ProductTask(vf.Task[ProductData]):
    @vf.reward(weight=1.0)
    async def correct(self, trace: vf.Trace) -> float:
        reply = trace.last_reply or ""
        asked = CALL.search(reply)
        said = str(int(asked[1]) * int(asked[2])) if asked else reply.strip()
        return float(said == str(self.data.answer))

    @vf.metric
    async def has_asked(self, trace: vf.Trace) -> float:
        return float(CALL.search(trace.last_reply or "") is not None)


class ProductConfig(vf.TasksetConfig):
    num_tasks: int = 200


class ProductTaskset(vf.Taskset[ProductTask, ProductConfig]):
    def load(self) -> list[ProductTask]:
        drawn = random.Random(0).sample(range(90 * 90), self.config.num_tasks)
        pairs = [(10 + each // 90, 10 + each % 90) for each in drawn]
        return [
            ProductTask(ProductData(prompt=f"Multiply {a} by {b}.", answer=a * b), self.config.task) for a, b in pairs
        ]
