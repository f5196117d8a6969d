"""An agent that was written for the openai client: the model writes down a product, the agent works it out."""

import re

from openai import AsyncOpenAI

CALL = re.compile(r"calc\((\d+)\*(\d+)\)")


async def solve(prompt, base_url, api_key, model):
    """Returns the answer: the product that the model has asked for, or what it said without asking."""
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        completion = await client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": prompt.text}], max_completion_tokens=24
        )
    said = completion.choices[0].message.content or ""
    asked = CALL.search(said)
    return str(int(asked[1]) * int(asked[2])) if asked else said
