"""`tileattn demo`: a page on this machine that runs attention with a chosen variant and shape.

form       the fields of the page and their limits; a bad value raises one error that names the field
measure    runs the chosen case and PyTorch's own attention, by the benchmark's runner
page       the page, in gradio; the only file that imports gradio (pip install 'tileattn[demo]')
"""
