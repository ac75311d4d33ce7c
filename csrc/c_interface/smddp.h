/* The engine of smddp, for programs in any language: collectives and messages on memory of the host.
 *
 * A program joins a job, gets the group of all its ranks, and makes the same calls in the same order on all ranks of a
 * group. It may make groups of some ranks. All functions may be called on any thread.
 *
 *   smddp_group* world;
 *   if (smddp_join("10.0.0.1", 29500, rank, size, 60.0, &world) != SMDDP_OK) puts(smddp_error());
 *   smddp_arguments sum = {.collective = SMDDP_ALLREDUCE, .output = x, .count = n, .type = SMDDP_FLOAT32};
 *   if (smddp_run(world, &sum) != SMDDP_OK) puts(smddp_error());
 *   smddp_leave(world);
 *
 * Errors: a function that fails returns what kind of failure it is, and smddp_error() its text. After a failure of
 * another kind than SMDDP_USAGE and SMDDP_PENDING the group is broken on all ranks: leave it. Settings are those of
 * docs/settings.md.
 */
#ifndef SMDDP_H
#define SMDDP_H

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define SMDDP_API __attribute__((visibility("default")))
#else
#define SMDDP_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef enum smddp_status {
  SMDDP_OK = 0,
  SMDDP_USAGE,       /* the call makes no sense; nothing was started */
  SMDDP_MISMATCH,    /* the ranks do not make the same call */
  SMDDP_PEER_LOST,   /* a rank has died, left or become unreachable */
  SMDDP_TIMEOUT,     /* a rank did not come in time */
  SMDDP_ABORTED,     /* the group was left or aborted meanwhile */
  SMDDP_TRANSPORT,   /* the network or shared memory failed */
  SMDDP_RESOURCE,    /* no memory, descriptors or threads are left */
  SMDDP_INTERNAL,    /* a bug in smddp */
  SMDDP_INTERRUPTED, /* the function of smddp_set_interrupt_check() said so */
  SMDDP_PENDING      /* the operation has not ended yet */
} smddp_status;

typedef enum smddp_type {
  SMDDP_FLOAT32,
  SMDDP_FLOAT64,
  SMDDP_FLOAT16,
  SMDDP_BFLOAT16,
  SMDDP_COMPLEX64,
  SMDDP_COMPLEX128,
  SMDDP_INT8,
  SMDDP_INT16,
  SMDDP_INT32,
  SMDDP_INT64,
  SMDDP_UINT8,
  SMDDP_UINT16,
  SMDDP_UINT32,
  SMDDP_UINT64,
  SMDDP_BOOL
} smddp_type;

typedef enum smddp_op {
  SMDDP_SUM,
  SMDDP_AVERAGE,
  SMDDP_PRODUCT,
  SMDDP_MIN,
  SMDDP_MAX,
  SMDDP_BAND,
  SMDDP_BOR,
  SMDDP_BXOR,
  SMDDP_SCALED_SUM /* the sum of factor * input */
} smddp_op;

/* What each rank passes; "count" elements are one block, P is the number of ranks.
 *
 *                         input                    output
 *   SMDDP_ALLREDUCE       a block                  a block
 *   SMDDP_BROADCAST       root: a block            a block
 *   SMDDP_ALLGATHER       a block                  P blocks, by rank
 *   SMDDP_REDUCE_SCATTER  P blocks, by rank        a block
 *   SMDDP_BARRIER         none                     none
 *   SMDDP_REDUCE          a block                  root: a block
 *   SMDDP_GATHER          a block                  root: P blocks, by rank
 *   SMDDP_SCATTER         root: P blocks, by rank  a block
 *   SMDDP_ALLTOALL        P blocks, to each rank   P blocks, from each rank
 *
 * In allreduce, broadcast and reduce the input may be the output, or null for that. In the others they must not overlap. */
typedef enum smddp_collective {
  SMDDP_ALLREDUCE,
  SMDDP_BROADCAST,
  SMDDP_ALLGATHER,
  SMDDP_REDUCE_SCATTER,
  SMDDP_BARRIER,
  SMDDP_REDUCE,
  SMDDP_GATHER,
  SMDDP_SCATTER,
  SMDDP_ALLTOALL
} smddp_collective;

/* Memory that an operation uses has to stay until `release` has been called with `held`, once, on any thread, also after
 * an error: other ranks may still write to it then. Without `release` it must stay as long as the process lives. */
typedef struct smddp_arguments {
  smddp_collective collective;
  const void* input;
  void* output;
  int64_t count;
  smddp_type type;
  smddp_op op;
  double factor; /* of SMDDP_SCALED_SUM */
  int root;
  double timeout; /* seconds; 0: that of the group */
  void (*release)(void* held);
  void* held;
} smddp_arguments;

typedef struct smddp_message {
  void* memory; /* a send does not change it */
  int64_t bytes;
  int peer; /* a rank of the group; -1: receive from any */
  int tag;  /* not negative */
  double timeout;
  void (*release)(void* held);
  void* held;
} smddp_message;

typedef struct smddp_group smddp_group;         /* of some ranks of the job */
typedef struct smddp_operation smddp_operation; /* a collective or message that was begun */

/* The text of this thread's last failure. It stays until the thread's next call. */
SMDDP_API const char* smddp_error(void);
SMDDP_API const char* smddp_version(void);

/* Joins a job of `size` ranks; waits for the others. Rank 0 serves the store at which they meet, at `host` and `port`,
 * until all have joined; `host` is a name or address of rank 0's machine. A job of one rank may pass port 0. `timeout`, in
 * seconds, is also that of later operations. Ranks that share a machine share memory. */
SMDDP_API smddp_status smddp_join(const char* host, int port, int rank, int size, double timeout,
                                  smddp_group** group);
/* Makes a group of some ranks of `parent`. All ranks of `parent` call it, each with the members of its own group, in
 * their order there; a rank that is to be in none passes a list without itself, or an empty one, and gets null. */
SMDDP_API smddp_status smddp_split(smddp_group* parent, const int* ranks, int count,
                                   smddp_group** group);
/* -1 for null; so does smddp_source(). */
SMDDP_API int smddp_rank(const smddp_group* group);
SMDDP_API int smddp_size(const smddp_group* group);
/* Waits until this rank's operations have ended, except receives, leaves, and frees the group. The group of the job is
 * left last. */
SMDDP_API smddp_status smddp_leave(smddp_group* group);
/* Ends everything in flight on the group, on all ranks. */
SMDDP_API smddp_status smddp_abort(smddp_group* group, const char* reason);

/* Begins an operation. smddp_free() frees it; that does not end it. */
SMDDP_API smddp_status smddp_begin(smddp_group* group, const smddp_arguments* arguments,
                                   smddp_operation** operation);
SMDDP_API smddp_status smddp_send(smddp_group* group, const smddp_message* message,
                                  smddp_operation** operation);
SMDDP_API smddp_status smddp_receive(smddp_group* group, const smddp_message* message,
                                     smddp_operation** operation);
/* Waits at most `seconds` (negative: until the operation's own time-out). Returns how it has ended, or SMDDP_PENDING. */
SMDDP_API smddp_status smddp_wait(smddp_operation* operation, double seconds);
/* Calls `action` once, when the operation has ended, on a thread of smddp; at once, on this thread, if it has ended. */
SMDDP_API void smddp_then(smddp_operation* operation, void (*action)(void* argument),
                          void* argument);
/* The rank from which a message was received. */
SMDDP_API int smddp_source(const smddp_operation* operation);
SMDDP_API void smddp_free(smddp_operation* operation);
/* Does smddp_begin(), smddp_wait() and smddp_free(), faster. After SMDDP_OK `release` is not called. */
SMDDP_API smddp_status smddp_run(smddp_group* group, const smddp_arguments* arguments);

/* Memory that the ranks of a machine share: they reduce it in place. Null if there is none left. */
SMDDP_API void* smddp_allocate(size_t bytes);
SMDDP_API void smddp_deallocate(void* memory);

/* Waits call `check` every 100 ms or more often, on the thread that waits; if it does not return 0, they end with
 * SMDDP_INTERRUPTED. Null: no function. */
SMDDP_API void smddp_set_interrupt_check(int (*check)(void));
/* Leaves all groups, and ends smddp's threads. For the end of the program. */
SMDDP_API void smddp_end(void);

#ifdef __cplusplus
}
#endif

#endif
