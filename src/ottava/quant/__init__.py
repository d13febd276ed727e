"""A number in fewer bits: formats, scales, quantized tensors, and the state that delayed scaling keeps."""
