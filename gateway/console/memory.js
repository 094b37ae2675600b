// What a model needs of a device's memory: weights, and keys and values of its users. Knows nothing about the page.
const GB = 1e9;

// Bits of a weight, with the scales of its blocks.
export const WEIGHTS = { "bf16": 16, "fp8": 8, "int8": 8, "int4": 4.5, "mxfp4": 4.25 };

export const MODELS = {
  "0.6B (Qwen3)": { billions: 0.6, layers: 28, kvHeads: 8, headDim: 128 },
  "4B (Qwen3)": { billions: 4.0, layers: 36, kvHeads: 8, headDim: 128 },
  "8B (Llama 3.1)": { billions: 8.0, layers: 32, kvHeads: 8, headDim: 128 },
  "14B (Qwen3)": { billions: 14.8, layers: 40, kvHeads: 8, headDim: 128 },
  "32B (Qwen3)": { billions: 32.8, layers: 64, kvHeads: 8, headDim: 128 },
  "70B (Llama 3.3)": { billions: 70.6, layers: 80, kvHeads: 8, headDim: 128 },
};

// Gigabytes of weights, of a token's keys and values and of a user's, and how many users fit. A tenth of the device is
// left to what runs beside: activations, graphs, the driver.
export function memoryOf({ billions, layers, kvHeads, headDim, weights, kvBits, gigabytes, context }) {
  const weightBytes = (billions * GB * WEIGHTS[weights]) / 8;
  const tokenBytes = (2 * layers * kvHeads * headDim * kvBits) / 8;
  const left = gigabytes * GB * 0.9 - weightBytes;
  return {
    weights: weightBytes / GB,
    token: tokenBytes / GB,
    user: (tokenBytes * context) / GB,
    tokens: Math.max(0, Math.floor(left / tokenBytes)),
    users: Math.max(0, Math.floor(left / (tokenBytes * context))),
  };
}
