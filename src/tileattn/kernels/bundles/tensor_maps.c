/* The one function of TileLang's library that a compiled kernel calls on the host, for machines without TileLang.

   A kernel's host code asks by name for `__tvm_tensormap_create_tiled`, and passes the arguments of the CUDA driver's
   cuTensorMapEncodeTiled (CUDA Driver API, "Tensor Map Object Management"). A bundle of kernels brings this file
   compiled, beside TVM's own runtime. Only the C interface of apache-tvm-ffi is used (tvm/ffi/c_api.h). The driver's
   functions are passed as addresses: so this compiles without CUDA's headers, and runs on any glibc. */

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include <tvm/ffi/c_api.h>

#define MOST_DIMENSIONS 5
#define BEFORE_SIZES 4 /* the map, the type, the number of dimensions, the address */
#define BEHIND_SIZES 4 /* interleave, swizzle, promotion in the L2 cache, the fill beyond the ends */

typedef int (*EncodeTiled)(void *map, int type, uint32_t dimensions, void *address, const uint64_t *sizes,
                           const uint64_t *strides, const uint32_t *box, const uint32_t *steps, int interleave,
                           int swizzle, int promotion, int fill);
typedef int (*ErrorName)(int result, const char **name);

static EncodeTiled encode;   /* cuTensorMapEncodeTiled */
static ErrorName error_name; /* cuGetErrorName */

static int refuse(const char *message) {
  TVMFFIErrorSetRaisedFromCStr("RuntimeError", message);
  return -1;
}

static int refuse_map(int result, uint32_t dimensions, const uint64_t *sizes, void *address) {
  char message[256];
  const char *name = "unknown";
  if (error_name != NULL) {
    error_name(result, &name);
  }
  snprintf(message, sizeof message, "cuTensorMapEncodeTiled returned %d (%s) for %u dimensions at %p, sizes %llu, ...",
           result, name == NULL ? "unknown" : name, dimensions, address, (unsigned long long)sizes[0]);
  return refuse(message);
}

static int create_tiled(void *self, const TVMFFIAny *args, int32_t count, TVMFFIAny *result) {
  uint64_t sizes[MOST_DIMENSIONS], strides[MOST_DIMENSIONS];
  uint32_t box[MOST_DIMENSIONS], steps[MOST_DIMENSIONS], dimensions, i;
  const TVMFFIAny *rest;
  int code;
  (void)self;
  if (encode == NULL) {
    return refuse("no tensor map can be made: there is no CUDA driver (libcuda.so.1) with cuTensorMapEncodeTiled");
  }
  dimensions = count < BEFORE_SIZES ? 0 : (uint32_t)args[2].v_int64;
  if (dimensions < 1 || dimensions > MOST_DIMENSIONS ||
      count != (int32_t)(BEFORE_SIZES + 4 * dimensions + BEHIND_SIZES)) {
    return refuse("__tvm_tensormap_create_tiled was called with a wrong number of arguments");
  }
  for (i = 0; i < dimensions; ++i) {
    sizes[i] = (uint64_t)args[BEFORE_SIZES + i].v_int64;
    strides[i] = (uint64_t)args[BEFORE_SIZES + dimensions + i].v_int64;
    box[i] = (uint32_t)args[BEFORE_SIZES + 2 * dimensions + i].v_int64;
    steps[i] = (uint32_t)args[BEFORE_SIZES + 3 * dimensions + i].v_int64;
  }
  rest = args + BEFORE_SIZES + 4 * dimensions;
  /* The driver takes no stride of the innermost dimension. */
  code = encode(args[0].v_ptr, (int)args[1].v_int64, dimensions, args[3].v_ptr, sizes, strides + 1, box, steps,
                (int)rest[0].v_int64, (int)rest[1].v_int64, (int)rest[2].v_int64, (int)rest[3].v_int64);
  if (code != 0) {
    return refuse_map(code, dimensions, sizes, args[3].v_ptr);
  }
  result->type_index = kTVMFFINone;
  result->zero_padding = 0;
  result->v_int64 = 0;
  return 0;
}

/* Makes the function known under the name that kernels ask for; 0 on success. Both addresses may be NULL. */
int tileattn_register_tensor_maps(void *encode_tiled, void *get_error_name) {
  static const char name[] = "__tvm_tensormap_create_tiled";
  TVMFFIByteArray text = {name, sizeof name - 1};
  TVMFFIObjectHandle function = NULL;
  int code;
  encode = (EncodeTiled)encode_tiled;
  error_name = (ErrorName)get_error_name;
  if (TVMFFIFunctionCreate(NULL, create_tiled, NULL, &function) != 0) {
    return -1;
  }
  code = TVMFFIFunctionSetGlobal(&text, function, 0);
  TVMFFIObjectDecRef(function); /* the table keeps it */
  return code;
}
