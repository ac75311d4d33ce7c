// Whether work on a stream is being recorded into a CUDA graph.
#pragma once

namespace smddp::cuda {

// Asks the CUDA driver that this process has loaded; false where there is none. `stream`: the driver's handle.
bool isCapturing(void* stream);

}  // namespace smddp::cuda
