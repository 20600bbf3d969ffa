import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import com.fasterxml.jackson.databind.node.ObjectNode;
import grabstream.client.ApiClient;
import grabstream.client.ApiException;
import grabstream.client.ApiResponse;
import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.lang.reflect.InvocationTargetException;
import java.lang.reflect.Method;
import java.lang.reflect.Parameter;
import java.net.http.HttpClient;
import java.util.Map;

/**
 * Calls operations of the generated client: a line of JSON in, {api, operation, arguments, body}; a line out,
 * {status, body}. Arguments and bodies become the types of the client, and its answers JSON again.
 */
public class Driver {
  public static void main(String[] words) throws Exception {
    ApiClient client = new ApiClient();
    // Otherwise Java asks for HTTP/2 in its first request (Upgrade: h2c), which the gateway refuses.
    client.setHttpClientBuilder(HttpClient.newBuilder().version(HttpClient.Version.HTTP_1_1));
    client.updateBaseUri(words[0]);
    String secret = System.getenv("GATEWAY_SECRET");
    client.setRequestInterceptor(request -> request.header("Authorization", "Bearer " + secret));
    ObjectMapper mapper = client.getObjectMapper();
    BufferedReader lines = new BufferedReader(new InputStreamReader(System.in, "UTF-8"));
    for (String line = lines.readLine(); line != null; line = lines.readLine()) {
      System.out.println(mapper.writeValueAsString(call(client, mapper, mapper.readTree(line))));
    }
  }

  private static JsonNode call(ApiClient client, ObjectMapper mapper, JsonNode asked) throws Exception {
    Class<?> api = Class.forName("grabstream.api." + asked.get("api").asText());
    Method method = method(api, asked.get("operation").asText());
    Parameter[] parameters = method.getParameters();
    Object[] given = new Object[parameters.length];
    for (int at = 0; at < given.length; at++) {
      boolean isBody = parameters[at].getType().getName().startsWith("grabstream.model.");
      JsonNode value = isBody ? asked.get("body") : asked.get("arguments").get(parameters[at].getName());
      given[at] = value == null ? null : mapper.treeToValue(value, parameters[at].getType());
    }
    ObjectNode answer = mapper.createObjectNode();
    try {
      Object instance = api.getConstructor(ApiClient.class).newInstance(client);
      ApiResponse<?> response = (ApiResponse<?>) method.invoke(instance, given);
      answer.put("status", response.getStatusCode());
      answer.set("body", mapper.valueToTree(response.getData()));
    } catch (InvocationTargetException error) {
      if (!(error.getCause() instanceof ApiException)) {
        throw error;
      }
      ApiException refused = (ApiException) error.getCause();
      if (refused.getCode() == 0) {
        throw refused;
      }
      answer.put("status", refused.getCode());
      answer.set("body", mapper.readTree(refused.getResponseBody()));
    }
    return answer;
  }

  /** The method of an operation. The generator puts `call` before a name that is a word of the language. */
  private static Method method(Class<?> api, String name) {
    String other = "call" + name.substring(0, 1).toUpperCase() + name.substring(1);
    for (Method method : api.getMethods()) {
      Class<?>[] types = method.getParameterTypes();
      boolean hasHeaders = types.length > 0 && types[types.length - 1] == Map.class;
      String called = method.getName();
      if (!hasHeaders && (called.equals(name + "WithHttpInfo") || called.equals(other + "WithHttpInfo"))) {
        return method;
      }
    }
    throw new IllegalArgumentException(name);
  }
}
