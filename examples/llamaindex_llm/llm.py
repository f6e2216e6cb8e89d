"""A bundle as a LlamaIndex LLM: import OrtGpt from here; `python llm.py` shows it at work."""

import asyncio
from contextlib import aclosing, closing
from typing import Any

from llama_index.core.llms import (
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
    CustomLLM,
    LLMMetadata,
)
from llama_index.core.llms.callbacks import llm_completion_callback
from pydantic import Field, PrivateAttr

import ortgpt


class OrtGpt(CustomLLM):
    """Continue prompts with an ortgpt bundle. `options` are those of GenerationOptions; a call may change them."""

    bundle: str = "austen"
    threads: int | None = None
    options: dict[str, Any] = Field(default_factory=dict)
    _generator: ortgpt.Generator = PrivateAttr()

    def model_post_init(self, context: Any) -> None:
        super().model_post_init(context)
        self._generator = ortgpt.load(self.bundle, threads=self.threads)

    @property
    def metadata(self) -> LLMMetadata:
        # LlamaIndex fits prompts into context_window - num_output tokens.
        return LLMMetadata(
            context_window=self._generator.bundle.config.n_positions,
            num_output=self.options.get("max_new_tokens", 128),
            is_chat_model=False,
            model_name=self.bundle,
        )

    # `formatted` tells whether LlamaIndex has put the prompt into the model's format; a GPT-2 has none.
    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        completion = self._generator.generate(prompt, **(self.options | kwargs))
        return CompletionResponse(text=completion.text, additional_kwargs={"finish_reason": completion.finish_reason})

    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:
        pieces = self._generator.stream(prompt, **(self.options | kwargs))

        def responses() -> CompletionResponseGen:
            text = ""
            with closing(pieces):  # who leaves the loop ends the generation
                for piece in pieces:
                    text += piece.text
                    yield CompletionResponse(text=text, delta=piece.text)  # the text so far, and what is new

        return responses()

    # Without the next two, CustomLLM's own call complete() and stream_complete(), which hold up the event loop.
    @llm_completion_callback()
    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        completion = await self._generator.agenerate(prompt, **(self.options | kwargs))
        return CompletionResponse(text=completion.text, additional_kwargs={"finish_reason": completion.finish_reason})

    @llm_completion_callback()
    async def astream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseAsyncGen:
        async def responses() -> CompletionResponseAsyncGen:
            text = ""
            async with aclosing(self._generator.astream(prompt, **(self.options | kwargs))) as pieces:
                async for piece in pieces:
                    text += piece.text
                    yield CompletionResponse(text=text, delta=piece.text)

        return responses()


async def show_async(llm: OrtGpt) -> None:
    responses = await asyncio.gather(llm.acomplete("My dear"), llm.acomplete("She was"))
    print("at once:", [response.text for response in responses])

    count = 0
    stream = await llm.astream_complete("It is a truth", max_new_tokens=5000, context_overflow="slide")
    async with aclosing(stream):
        async for _ in stream:
            count += 1
            if count == 5:
                break  # ends the generation: 5,000 tokens were asked for
    print("left after", count, "responses")


def main() -> None:
    llm = OrtGpt(options={"max_new_tokens": 24, "temperature": 0.8, "seed": 7})
    print("complete:", llm.complete("It is a truth").text)
    print("stop:", llm.complete("It is a truth", stop=[","]).text)
    print("stream:", "|".join(response.delta or "" for response in llm.stream_complete("Dear Jane,")))
    asyncio.run(show_async(llm))
    try:
        llm.complete("It is a truth", temperature=-1)
    except ortgpt.OptionError as error:
        print("error:", error)


if __name__ == "__main__":
    main()
