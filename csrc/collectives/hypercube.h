// Arithmetic for exchanges in which the distance between partners doubles or halves. The nodes are the C corners of a
// hypercube. If their number is not a power of two, the other nodes are *folded*: node C + i sends its data to
// corner i before the exchange and gets the result from there after it.
// Example: with 6 nodes C = 4. Nodes 4 and 5 are folded onto 0 and 1; the partners of node 1 are 0 and 3.
#pragma once

#include <bit>

#include "plan/topology.h"

namespace smddp::collectives {

class Hypercube {
 public:
  explicit Hypercube(const plan::Topology& t)
      : me_(t.myNode()),
        numNodes_(t.numNodes()),
        numCorners_(static_cast<int>(std::bit_floor(static_cast<unsigned>(t.numNodes())))) {}

  int numCorners() const { return numCorners_; }
  int dimensions() const { return std::countr_zero(static_cast<unsigned>(numCorners_)); }
  bool isFolded() const { return me_ >= numCorners_; }
  // For a folded node its corner; for a corner the node that is folded onto it, or -1.
  int foldPartner() const {
    if (isFolded()) return me_ - numCorners_;
    return me_ + numCorners_ < numNodes_ ? me_ + numCorners_ : -1;
  }
  // The corner across dimension d.
  int partner(int d) const { return me_ ^ (1 << d); }
  // True if my operand comes first. Both partners must combine the operands in the same order.
  bool isLower(int d) const { return (me_ & (1 << d)) == 0; }

 private:
  int me_, numNodes_, numCorners_;
};

}  // namespace smddp::collectives
