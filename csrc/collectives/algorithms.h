// All algorithms. P ranks, N nodes, L ranks on a node, M bytes.
//
// A "synchronisation" is a wait for the other ranks of the node; it takes about as long as a cache line takes from
// one core to another. A "step" is one network latency on the critical path. Bytes are those that one rank sends
// (network) or copies and sums (memory).
#pragma once

#include "collectives/collective.h"

namespace smddp::collectives {

// One node. 1 synchronisation; reads L * M.
plan::Plan allreduceOneShot(const plan::Topology&, const plan::Limits&, const Shape&);
// One node. 3 synchronisations a chunk; copies 2 M (L-1)/L, sums M.
plan::Plan allreduceTwoPhase(const plan::Topology&, const plan::Limits&, const Shape&);
// One node, shared buffers. 2 synchronisations; reads M, writes M.
plan::Plan allreduceZeroCopy(const plan::Topology&, const plan::Limits&, const Shape&);
// Any nodes. 2 synchronisations, lg N steps; the first rank of a node sends lg N * M.
plan::Plan allreduceRecursiveDoubling(const plan::Topology&, const plan::Limits&, const Shape&);
// Any nodes. 2 lg N steps; sends 2 M/L (N-1)/N. If N is not a power of two: 2 steps more and M/L more.
plan::Plan allreduceHalvingDoubling(const plan::Topology&, const plan::Limits&, const Shape&);
// Any nodes. 2 steps; sends 2 M/L (N-1)/N.
plan::Plan allreduceDirect(const plan::Topology&, const plan::Limits&, const Shape&);
// Any nodes. 2 (N-1) steps, neighbours only; sends 2 M/L (N-1)/N.
plan::Plan allreduceRing(const plan::Topology&, const plan::Limits&, const Shape&);

// One node. 2 synchronisations a chunk; the root copies M, the others M.
plan::Plan broadcastSharedMemory(const plan::Topology&, const plan::Limits&, const Shape&);
// Any nodes. N-1 steps, pipelined; sends M/L.
plan::Plan broadcastChain(const plan::Topology&, const plan::Limits&, const Shape&);

// One node. 2 synchronisations a chunk; copies (L+1) M, shared: L * M.
plan::Plan allgatherSharedMemory(const plan::Topology&, const plan::Limits&, const Shape&);
// Any nodes. 1 step; sends (N-1) M.
plan::Plan allgatherMesh(const plan::Topology&, const plan::Limits&, const Shape&);

// One node. 2 synchronisations a chunk; copies (L-1) M, sums L * M, shared: only the sum.
plan::Plan reduceScatterSharedMemory(const plan::Topology&, const plan::Limits&, const Shape&);
// Any nodes. 1 step; sends (N-1) M.
plan::Plan reduceScatterDirect(const plan::Topology&, const plan::Limits&, const Shape&);

// One node. 1 synchronisation; the root reads L * M.
plan::Plan reduceOneShot(const plan::Topology&, const plan::Limits&, const Shape&);
// One node. 3 synchronisations a chunk; copies M (L-1)/L, the root twice, sums M. Shared: 2, only the sum.
plan::Plan reduceSharedMemory(const plan::Topology&, const plan::Limits&, const Shape&);

// Any nodes. 2 steps, 1 for short vectors; sends M/L.
plan::Plan reduceDirect(const plan::Topology&, const plan::Limits&, const Shape&);

// Any nodes. 1 step; a rail sends M for each block that it carries.
plan::Plan gatherDirect(const plan::Topology&, const plan::Limits&, const Shape&);
// Any nodes. 1 step; a rail sends M for each block that it carries.
plan::Plan scatterDirect(const plan::Topology&, const plan::Limits&, const Shape&);
// Any nodes. 1 step; sends (P-L) M.
plan::Plan alltoallDirect(const plan::Topology&, const plan::Limits&, const Shape&);

// Any nodes. 1 synchronisation; with several nodes 1 step and a second synchronisation.
plan::Plan barrierExchange(const plan::Topology&, const plan::Limits&, const Shape&);

}  // namespace smddp::collectives
