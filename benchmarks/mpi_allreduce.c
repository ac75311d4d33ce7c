// Measures allreduce of float32, in place, with MPI, in microseconds. engine_and_mpi.py runs it beside engine_bench.
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>

static double perCall(float* vector, int count, long calls) {
  MPI_Barrier(MPI_COMM_WORLD);
  const double start = MPI_Wtime();
  for (long i = 0; i < calls; ++i) {
    MPI_Allreduce(MPI_IN_PLACE, vector, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
  }
  double seconds = (MPI_Wtime() - start) / (double)calls;
  MPI_Allreduce(MPI_IN_PLACE, &seconds, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
  return seconds;
}

// Arguments: seconds per size, then the sizes in bytes.
int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  int rank;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  const double budget = argc > 1 ? atof(argv[1]) : 0.1;
  for (int i = 2; i < argc; ++i) {
    const long bytes = atol(argv[i]);
    float* vector = calloc((size_t)bytes, 1);
    perCall(vector, (int)(bytes / 4), 3);
    const double guess = perCall(vector, (int)(bytes / 4), 3);
    const long calls = (long)(budget / guess) + 1;
    const double seconds = perCall(vector, (int)(bytes / 4), calls);
    if (rank == 0) printf("%ld %.4f\n", bytes, seconds * 1e6);
    free(vector);
  }
  MPI_Finalize();
  return 0;
}
