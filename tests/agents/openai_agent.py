"""An agent program as anyone would write it with the `openai` package; nothing in it knows of Lagoon but its task."""

import json
import os

from openai import OpenAI

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]

client = OpenAI()
task = json.loads(os.environ["LAGOON_TASK"])
model = client.models.list().data[0].id
messages = [{"role": "user", "content": f"task {task['index']}"}]
while True:
    message = client.chat.completions.create(model=model, messages=messages, tools=TOOLS).choices[0].message
    messages.append(message)
    if not message.tool_calls:
        break
    for call in message.tool_calls:
        seen = json.loads(call.function.arguments)["what"]
        messages.append({"role": "tool", "tool_call_id": call.id, "content": f"saw {seen}"})
messages.append({"role": "user", "content": "thanks"})
stream = client.chat.completions.create(model=model, messages=messages, tools=TOOLS, stream=True)
said = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
print("the agent said", said)
print(0.25 if message.content == "a cat" and said == "bye" else -1)
