"""Print what the runtime alone makes of a bundle, as JSON: `make test-oldest` compares two environments by it."""

from __future__ import annotations

import json
import sys

import ortgpt

PROMPTS = ["It is a truth universally acknowledged,", "", '"My dear Mr. Bennet," said his lady', "日本"]

with ortgpt.load(sys.argv[1]) as generator:
    greedy = [completion.token_ids for completion in generator.generate_batch(PROMPTS, max_new_tokens=48)]
    drawn = [generator.generate(prompt, max_new_tokens=48, top_p=0.9, seed=3).token_ids for prompt in PROMPTS]
    score = round(generator.score("It is a truth universally acknowledged").nll, 3)
sys.stdout.write(json.dumps({"greedy": greedy, "drawn": drawn, "nll": score}) + "\n")
