"""`tileattn demo`: a page on this machine where a variant and a shape are chosen, and run.

form       what the page asks for; a bad value is one error that names the field and what is accepted
measure    runs what was asked for beside PyTorch's own attention: the benchmark's runner, on one case
page       the page, in gradio; the only file that imports it (pip install 'tileattn[demo]')
"""
