"""Print, as JSON, what the runtime computes with a bundle: `python checks/greedy.py BUNDLE`.

`make check-pythons` compares the output of several Pythons. Needs the runtime alone.
"""

from __future__ import annotations

import json
import sys

import ortgpt

PROMPTS = ["It is a truth universally acknowledged,", "", '"My dear Mr. Bennet," said his lady', "日本"]


def main(bundle: str) -> None:
    with ortgpt.load(bundle) as generator:
        greedy = generator.generate_batch(PROMPTS, max_new_tokens=48)
        beams = generator.generate_batch(PROMPTS, max_new_tokens=12, num_beams=3)
        sampled = [generator.generate(prompt, max_new_tokens=48, top_p=0.9, seed=3) for prompt in PROMPTS]
        grammar = [generator.generate(prompt, max_new_tokens=12, grammar="[A-Z][a-z ]{3,30}") for prompt in PROMPTS]
        lookup = generator.generate("a man and a man and a", max_new_tokens=24, prompt_lookup_num_tokens=6)
        nll = generator.score("It is a truth universally acknowledged").nll
    completions = {"greedy": greedy, "sampled": sampled, "beams": beams, "grammar": grammar, "look-up": [lookup]}
    token_ids = {name: [completion.token_ids for completion in group] for name, group in completions.items()}
    print(json.dumps({**token_ids, "nll": round(nll, 3)}))


if __name__ == "__main__":
    main(sys.argv[1])
