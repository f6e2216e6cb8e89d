"""A page that writes while you watch, made with Gradio: `python app.py`, then open the address it prints."""

import os
from collections.abc import Iterator
from contextlib import closing

import gradio as gr

import ortgpt


def page(generator: ortgpt.Generator) -> gr.Blocks:
    def write(prompt: str, tokens: int, temperature: float, seed: float | None) -> Iterator[str]:
        text = prompt
        try:
            # closing(): when Stop is pressed or the page is left, Gradio drops this function in the middle of its loop.
            with closing(
                generator.stream(
                    prompt,
                    max_new_tokens=int(tokens),  # Gradio's sliders give whole numbers as floats, too
                    context_overflow="slide",
                    temperature=temperature,
                    seed=None if seed is None else int(seed),
                )
            ) as pieces:
                for piece in pieces:
                    text += piece.text
                    yield text  # Gradio shows what is yielded in place of what was there
        except ortgpt.OrtGptError as error:
            raise gr.Error(str(error)) from None  # shown on the page; without it users see "Error" only

    # Gradio sends usage statistics unless it is told not to.
    with gr.Blocks(title="ortgpt", analytics_enabled=False) as blocks:
        prompt = gr.Textbox("It is a truth universally acknowledged,", label="Prompt", lines=2)
        with gr.Row():
            tokens = gr.Slider(1, 2000, 200, step=1, label="Tokens")
            temperature = gr.Slider(0.0, 1.5, 0.8, label="Temperature (0: always the most likely token)")
            seed = gr.Number(7, precision=0, label="Seed (none: another text each time)")
        with gr.Row():
            start, stop = gr.Button("Write", variant="primary"), gr.Button("Stop")
        text = gr.Textbox(label="Text", lines=12)
        writing = start.click(write, [prompt, tokens, temperature, seed], text, api_name="write")
        stop.click(None, cancels=[writing])
    # Two texts at a time, since they share the CPU; up to 16 visitors wait, and others are told that the page is busy.
    return blocks.queue(default_concurrency_limit=2, max_size=16)


if __name__ == "__main__":
    with ortgpt.load(os.environ.get("BUNDLE", "austen")) as generator:
        # The theme's own fonts would be fetched from Google by every visitor's browser.
        theme = gr.themes.Default(font="sans-serif", font_mono="monospace")
        page(generator).launch(server_name="127.0.0.1", theme=theme)
