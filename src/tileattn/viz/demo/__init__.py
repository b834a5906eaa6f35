"""`tileattn demo`: a page on this machine that runs attention with chosen masks, functions and shapes.

form             the fields of the page and their limits; a bad value raises one error that names the field
function         a mask or score function that is typed in, read without executing it
call, terms      what the fields describe: its tensors, and the same as a script that can be copied
implementations  tileattn, FlashAttention's two loops, the definition, PyTorch's own attention
measure          runs a call by each of them: error, time, memory
pictures         the tile map and the bars, as SVG and HTML
page             the page, in gradio; the only file that imports gradio (the extra `demo`)
"""
