"""Print what the runtime alone makes of a bundle, as JSON: `make test-pythons` compares environments by it."""

from __future__ import annotations

import json
import sys

import ortgpt

PROMPTS = ["It is a truth universally acknowledged,", "", '"My dear Mr. Bennet," said his lady', "日本"]

with ortgpt.load(sys.argv[1]) as generator:
    greedy = [completion.token_ids for completion in generator.generate_batch(PROMPTS, max_new_tokens=48)]
    drawn = [generator.generate(prompt, max_new_tokens=48, top_p=0.9, seed=3).token_ids for prompt in PROMPTS]
    beams = [each.token_ids for each in generator.generate_batch(PROMPTS, max_new_tokens=12, num_beams=3)]
    held = [generator.generate(prompt, max_new_tokens=12, grammar="[A-Z][a-z ]{3,30}").text for prompt in PROMPTS]
    guessed = generator.generate("a man and a man and a", max_new_tokens=24, prompt_lookup_num_tokens=6).token_ids
    score = round(generator.score("It is a truth universally acknowledged").nll, 3)
found = {"greedy": greedy, "drawn": drawn, "beams": beams, "grammar": held, "look-up": guessed, "nll": score}
sys.stdout.write(json.dumps(found) + "\n")
