"""A bundle as a LangChain LLM: import OrtGpt from here; `python llm.py` shows it at work."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, closing
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models.llms import LLM
from langchain_core.output_parsers import StrOutputParser
from langchain_core.outputs import GenerationChunk
from langchain_core.prompts import PromptTemplate
from pydantic import Field, PrivateAttr

import ortgpt


class OrtGpt(LLM):
    """Continue prompts with an ortgpt bundle. `options` are those of GenerationOptions; a call may change them."""

    bundle: str = "austen"
    threads: int | None = None
    options: dict[str, Any] = Field(default_factory=dict)
    _generator: ortgpt.Generator = PrivateAttr()

    def model_post_init(self, context: Any) -> None:
        super().model_post_init(context)
        self._generator = ortgpt.load(self.bundle, threads=self.threads)

    @property
    def _llm_type(self) -> str:
        return "ortgpt"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        return {"model_name": self.bundle, "options": self.options}  # LangChain's caches tell models apart by this

    def _options(self, stop: list[str] | None, keywords: dict[str, Any]) -> dict[str, Any]:
        return self.options | keywords | ({"stop": stop} if stop else {})

    def _call(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> str:
        return self._generator.generate(prompt, **self._options(stop, kwargs)).text

    async def _acall(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> str:
        # LangChain's default would run _call in a thread, where cancelling the task could not end it.
        return (await self._generator.agenerate(prompt, **self._options(stop, kwargs))).text

    def _stream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[GenerationChunk]:
        # closing(): who leaves the loop over llm.stream() ends the generation.
        with closing(self._generator.stream(prompt, **self._options(stop, kwargs))) as pieces:
            for piece in pieces:
                chunk = self._chunk(piece)
                if run_manager:
                    run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk

    async def _astream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[GenerationChunk]:
        async with aclosing(self._generator.astream(prompt, **self._options(stop, kwargs))) as pieces:
            async for piece in pieces:
                chunk = self._chunk(piece)
                if run_manager:
                    await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk

    @staticmethod
    def _chunk(piece: ortgpt.Piece) -> GenerationChunk:
        info = {"finish_reason": piece.finish_reason} if piece.finish_reason else None
        return GenerationChunk(text=piece.text, generation_info=info)


async def show_async(llm: OrtGpt) -> None:
    texts = await asyncio.gather(llm.ainvoke("My dear"), llm.ainvoke("She was"))
    print("at once:", texts)

    count = 0
    chunks = llm.astream("It is a truth", max_new_tokens=5000, context_overflow="slide")
    # With aclosing() the generation ends at once; without it, when Python collects the iterator.
    async with aclosing(chunks):  # type: ignore[type-var]  # a generator, which LangChain annotates as an iterator
        async for _ in chunks:
            count += 1
            if count == 5:
                break  # ends the generation: 5,000 tokens were asked for
    print("left after", count, "chunks")


def main() -> None:
    llm = OrtGpt(options={"max_new_tokens": 24, "temperature": 0.8, "seed": 7})
    print("invoke:", llm.invoke("It is a truth"))
    print("stop:", llm.invoke("It is a truth", stop=[","]))
    chain = PromptTemplate.from_template("Dear {name},") | llm | StrOutputParser()
    print("chain:", "|".join(chain.stream({"name": "Jane"})))
    asyncio.run(show_async(llm))
    try:
        llm.invoke("It is a truth", temperature=-1)
    except ortgpt.OptionError as error:
        print("error:", error)


if __name__ == "__main__":
    main()
