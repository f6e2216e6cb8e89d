// Continue prompts with a portable bundle in Transformers.js under Node, as its users would. JSON in, JSON out.
import { readFileSync } from "node:fs";
import path from "node:path";
import { AutoModelForCausalLM, AutoTokenizer, env } from "@huggingface/transformers";

const folder = path.resolve(process.argv[2]);
const job = JSON.parse(readFileSync(0, "utf-8"));
env.allowRemoteModels = false;
env.localModelPath = path.dirname(folder);
const name = path.basename(folder);
const tokenizer = await AutoTokenizer.from_pretrained(name);
// subfolder: the bundle has model.onnx at its top, where Transformers.js looks in onnx/ by default.
const model = await AutoModelForCausalLM.from_pretrained(name, { dtype: "fp32", subfolder: "" });
tokenizer.padding_side = "left";
tokenizer.pad_token ??= tokenizer.eos_token;

const numbers = (tensor) => tensor.tolist().map((row) => row.map(Number));

async function continued(texts) {
  const inputs = tokenizer(texts, { padding: true });
  const ids = await model.generate({
    ...inputs, max_new_tokens: job.max_new_tokens, do_sample: false, eos_token_id: null,
  });
  return numbers(ids).map((row) => row.slice(inputs.input_ids.dims[1]));
}

const solo = [];
for (const text of job.texts) solo.push((await continued([text]))[0]);
console.log(JSON.stringify({
  prompts: job.texts.map((text) => numbers(tokenizer(text).input_ids)[0]),
  solo,
  batch: await continued(job.texts),
}));
