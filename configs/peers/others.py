"""Lists names that people try although no server has them, and options of llama-cpp-python's server."""

from quire.configs.peers.groups import refused, renamed

_GPU = "set --device cuda, or CUDA_VISIBLE_DEVICES to choose the GPUs"
_LENGTH = "set --max-model-len (prompt and output together)"
_OUTPUT = "a field of requests, max_tokens; --override-generation-config '{\"max_new_tokens\": N}' sets its default"

GROUPS = (
    renamed("max_model_len", "--n-ctx= --num-ctx= --ctx-len="),
    renamed("num_threads", "--n-threads= --num-thread="),
    renamed("host", "--bind= --listen= --address="),
    renamed("served_model_name", "--model-alias= --model-name="),
    renamed("log_level", "--debug", value="debug"),
    renamed("device", "--cpu", value="cpu"),
    renamed("device", "--gpu --cuda", value="cuda"),
    refused(_LENGTH, "--context= --context-size= --ctx= --max-context= --max-context-length= --max-seq-len= "
        "--max-length= --max-position-embeddings="),
    refused(_OUTPUT, "--max-tokens= --max-new-tokens= --max-output-tokens="),
    refused(_GPU, "--gpus= --num-gpus= --gpu-id= --gpu-ids="),
    refused("set --gpu-memory-utilization, a fraction, or --kv-cache-memory-bytes", "--gpu-memory= --max-memory= "
        "--memory= --kv-cache-size="),
    refused("set --max-num-batched-tokens (tokens per step)", "--n-batch= --prefill-batch-size="),
    refused("set --max-num-seqs", "--concurrency= --max-concurrency= --max-batch= --batch="),
    refused("set --api-server-count", "--workers= --num-workers="),
    refused("set --tensor-parallel-size", "--tensor-parallel= --world-size="),
    refused("set --quantization int8 or int4; quantized checkpoints are recognized", "--quant= --load-in-8bit "
        "--load-in-4bit --bits="),
    refused("set --ssl-certfile and --ssl-keyfile", "--ssl --tls --https --cert= --key="),
    refused("set --allowed-origins", "--cors --enable-cors"),
    refused("a field of requests; `quire run --system-prompt` has one", "--system= --system-prompt= --prompt= "
        "--chat-format="),
)  # fmt: skip
